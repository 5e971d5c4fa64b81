"""A conversation whose cache lives from turn to turn: a turn feeds only the tokens that are new.

    messages -> template -> text -> tokens that are new -> model -> reply
                                          ^                  |
                                          +---- the cache <--+

The model's own tokens stay as it chose them: a reply is not tokenized again. Where a template writes an earlier turn
in another way (some drop the reasoning of old replies), the cache is rewound to where the texts part.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.errors import InputError
from graphopt.inference.conversation.template import ChatTemplate, Message
from graphopt.inference.decoding.continuation import Continuation, Settings, start
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.decoding.sampling import GREEDY, Sampling
from graphopt.inference.generation import Completion, as_speculation, room_for, run
from graphopt.inference.prompt_cache import PromptCache, go_back, shared_length

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from graphopt.inference.decoding.grammar import Grammar
    from graphopt.inference.decoding.proposers import Proposer
    from graphopt.inference.decoding.speculation import Speculation
    from graphopt.inference.session import Session

MAX_REPLY_TOKENS = 1024
"""Tokens of a reply at most, by default."""


class Conversation:
    """A conversation with a model.

    Args:
        session: the model.
        system: the system prompt; by default the template's own, if it has one.
        messages: the conversation so far, after the system prompt; it ends with the model's reply.
        settings: how replies are made.
        tools: functions that the model may call, as JSON schemas, for templates that know of them.
        variables: what else the template reads, such as ``{"enable_thinking": False}``.
        proposer: what guesses tokens, as for :func:`graphopt.generate`; replies stay the same.
        cache: a prompt that the model has read already; its system prompt is the conversation's unless ``system`` is
            given.

    Attributes:
        messages: what was said so far, as the template sees it.
        settings: how the next reply is made.
        last: the last reply, with the prompt that it continued; ``None`` before the first.
        fed_tokens: tokens of the prompt that the last turn fed to the model; the cache held the others.

    Raises:
        InputError: the model has no chat template, or no tokenizer.
    """

    def __init__(
        self,
        session: Session,
        *,
        system: str | None = None,
        messages: Sequence[Message] = (),
        settings: Settings | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        proposer: Proposer | Speculation | None = None,
        cache: PromptCache | None = None,
    ) -> None:
        self._session, self._tokenizer = session, session.require_tokenizer()
        self._speculation = None if proposer is None else as_speculation(proposer)
        self._template = ChatTemplate.of_folder(session.file.parent)
        if cache is not None and system is None:
            system = cache.prompt.system
        first = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[Message] = [*first, *messages]
        self.settings = settings or Settings(max_new_tokens=MAX_REPLY_TOKENS)
        self.last: Completion | None = None
        self.fed_tokens = 0
        self._tools, self._variables = tools, dict(variables or {})
        self._decoder: Decoder | None = None if cache is None else cache.decoder.fork([0])
        # of the conversation; the cache holds the first of them
        self._tokens: list[int] = [] if cache is None else list(cache.prompt.tokens)
        self._text = ""  # whose tokens they are, or nothing where that is not known
        self._open: Generator[str, None, None] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the conversation so far."""
        return len(self._tokens)

    def reply(self, message: str | Message) -> Completion:
        """Say something and return the model's reply; see :meth:`stream`."""
        for _ in self.stream(message):
            pass
        assert self.last is not None
        return self.last

    def stream(self, message: str | Message, is_halted: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Say something and give the model's reply piece by piece.

        The message is checked at once; the model runs as the pieces are consumed. A reply that is not consumed to its
        end, or that ``is_halted`` ends, becomes part of the conversation as far as it came; if nothing came, neither
        the message nor the reply does.

        Args:
            message: what the user says, or a message with a role of its own, such as the result of a tool.
            is_halted: asked after each run of the model whether to end the reply.

        Raises:
            InputError: the template refuses the message, the conversation has more tokens than the model has positions,
                or a stop string or the grammar cannot be used. The conversation is as it was then.
            MissingDependencyError: jinja2 is not installed, or llguidance for a grammar.
        """
        if self._open is not None:
            self._open.close()
        turn = {"role": "user", "content": message} if isinstance(message, str) else dict(message)
        messages = [*self.messages, turn]
        text = self._template.render(messages, tools=self._tools, **self._variables)
        settings = replace(self.settings, eos=(*self.settings.eos, *self._end_of_turn()))
        row = start(self._session, self._tokens_of(text), settings, name="the conversation")
        self._open = self._answer(messages, text, row, is_halted)
        return self._open

    def _answer(
        self, messages: Sequence[Message], text: str, row: Continuation, is_halted: Callable[[], bool]
    ) -> Generator[str, None, None]:
        decoder, prefix = self._reuse_decoder(row)
        self._tokens, self._text, self.fed_tokens = row.prompt, "", len(row.prompt) - prefix
        drafts = None if self._speculation is None else self._speculation.start(self._session, [row])
        ids = np.array([row.prompt[prefix:]], np.int64)
        try:
            with closing(run(decoder, [row], ids, is_halted=is_halted, drafts=drafts)) as steps:
                for step in steps:
                    if decoder.tokens[0] == len(row.prompt):
                        decoder.keep()  # a template may write what follows in another way next time
                    if step.texts[0]:
                        yield step.texts[0]
        except GeneratorExit:
            row.interrupt()
        except BaseException:
            # It is not known how much of the step that failed is in the cache.
            self._decoder, self._tokens = None, []
            raise
        self._tokens = [*row.prompt, *row.tokens]
        if row.stop_reason != "stop string":
            # The tokens of a stop string are in the cache, and its text is not part of the reply.
            self._text = text + row.text
        self.last = Completion.from_row(row)
        if row.tokens or row.stop_reason != "interrupted":
            self.messages = [*messages, {"role": "assistant", "content": row.text}]

    def _reuse_decoder(self, row: Continuation) -> tuple[Decoder, int]:
        """Return a decoder that holds the beginning of a prompt, and how many of its tokens that is."""
        if self._decoder is not None:
            length = int(self._decoder.tokens[0])
            # The last token is fed in any case: its logits choose the next.
            prefix = go_back(self._decoder, shared_length(self._tokens[:length], row.prompt[:-1]))
            if prefix is not None:
                return self._decoder, prefix
        self._decoder = Decoder(self._session, 1, room=room_for([row]))
        return self._decoder, 0

    def _tokens_of(self, text: str) -> list[int]:
        """Return the tokens of a rendered conversation: those that are known, and behind them those of what is new."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        length = len(self._text)
        if length and text.startswith(self._text):
            first = next((index for index, (begin, _) in enumerate(encoding.offsets) if begin >= length), len(ids))
            if first == 0 or encoding.offsets[first - 1][1] <= length:
                return [*self._tokens, *ids[first:]]
        return ids

    def _end_of_turn(self) -> list[int]:
        """Return the tokenizer's EOS token: some models state another one in their configuration, from before chat."""
        token = self._template.special.get("eos_token")
        token_id = None if token is None else self._tokenizer.token_to_id(token)
        return [] if token_id is None else [token_id]


def chat(
    session: Session,
    messages: Sequence[Message],
    *,
    max_new_tokens: int | None = MAX_REPLY_TOKENS,
    sampling: Sampling = GREEDY,
    stop: Sequence[str] = (),
    grammar: Grammar | None = None,
    logprobs: int | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> Completion:
    """Return a model's reply to a conversation; :class:`Conversation` goes on from there without feeding it again.

    Args:
        session: the model.
        messages: dictionaries with ``role`` (``system``, ``user``, ``assistant``, what the template knows) and
            ``content``, the oldest first.
        max_new_tokens: tokens of the reply at most; ``None`` for as many as the model has positions.
        sampling: how tokens are chosen.
        stop: strings that end the reply, which ends before the first of them.
        grammar: the form that the reply must have; needs ``graphopt[chat]``.
        logprobs: how many of the most likely tokens to list beside each chosen one, with their log probabilities.
        tools: functions that the model may call, as JSON schemas, for templates that know of them.
        variables: what else the template reads, such as ``enable_thinking=False``.

    Raises:
        InputError: there is no message, the model has no chat template, or as :meth:`Conversation.stream`.
        MissingDependencyError: jinja2 is not installed, or llguidance for a grammar.
    """
    if not messages:
        raise InputError("there is no message to reply to", remedy='give [{"role": "user", "content": "..."}]')
    settings = Settings(max_new_tokens, sampling, tuple(stop), grammar, logprobs)
    *before, newest = messages
    conversation = Conversation(session, messages=before, settings=settings, tools=tools, variables=variables)
    return conversation.reply(newest)
