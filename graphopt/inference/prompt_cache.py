"""Prompts that were read already: a beginning that many texts share is read once, kept in a file, and loaded.

    make    tokens -> model -> states -> file
    use     file -> states -> copies, one for each prompt, taken back to the tokens that it shares -> the rest is fed
    edit    states of the text as it was -> spans that differ are read, what stands behind them moves -> states

What is shared is decided by tokens, so a text comes out as without a cache, up to the rounding of steps of another
length. The file is that of :meth:`graphopt.inference.decoding.decoder.Decoder.save`, with the prompt beside the states.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphopt.errors import InputError
from graphopt.inference.conversation.template import ChatTemplate
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.decoding.editing import REREAD, edits_between
from graphopt.inference.states.state_file import SavedPrompt, StateFile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.inference.decoding.editing import Edit
    from graphopt.inference.session import Session
    from graphopt.inference.states.compression import Loss


class PromptCache:
    """The beginning of prompts, and the states of a model behind it.

    Attributes:
        session: the model.
        prompt: its text and tokens, and what a chat with it is told first.
        decoder: one row that has read these tokens; it is copied before it goes on.
    """

    def __init__(
        self, session: Session, prompt: SavedPrompt, decoder: Decoder, original: StateFile | None = None
    ) -> None:
        self.session, self.prompt, self.decoder = session, prompt, decoder
        # a file, and how many tokens of it the row has had ever since
        self._original = None if original is None else (original, len(prompt.tokens))

    @classmethod
    def read_text(cls, session: Session, text: str) -> PromptCache:
        """Let the model read a text that prompts begin with.

        Raises:
            InputError: the text has no tokens or more than the model has positions, or the states of the graph cannot
                be copied.
        """
        return cls._prefill(session, SavedPrompt(text, session.encode(text)))

    @classmethod
    def read_system(cls, session: Session, system: str) -> PromptCache:
        """Let the model read a system prompt as its chat template writes it, up to the first message of a user.

        Raises:
            InputError: as for :meth:`read_text`; or the model has no chat template or no tokenizer.
        """
        return cls._prefill(session, _system_prompt(session, system))

    @classmethod
    def _prefill(cls, session: Session, prompt: SavedPrompt) -> PromptCache:
        _check_prompt(session, prompt)
        decoder = Decoder(session, 1, room=len(prompt.tokens))
        for _ in decoder.feed(np.array([prompt.tokens], np.int64)):
            pass
        decoder.keep()
        return cls(session, prompt, decoder)

    @classmethod
    def load(cls, session: Session, file: str | Path) -> PromptCache:
        """Read a file that :meth:`save` wrote.

        Raises:
            InputError: the file cannot be read, was changed, is of another model, or holds no prompt.
        """
        content = StateFile.load(Path(file))
        if content.prompt is None:
            raise InputError("the cache holds no prompt", file=file, remedy="make it by `graphopt cache make`")
        decoder = Decoder.restore(session, file)
        decoder.keep()
        return cls(session, content.prompt, decoder, content)

    def save(self, file: str | Path, loss: Loss = "none") -> None:
        """Write the states and the prompt.

        Args:
            file: where to.
            loss: what may be lost, see :mod:`graphopt.inference.states.compression`; nothing by default.

        Raises:
            InputError: the states of the graph cannot be saved.
        """
        self.decoder.save(file, self.prompt, loss, self._original)

    def edit(self, text: str, *, reread: int = REREAD) -> list[Edit]:
        """Go over to another text, where it differs: those tokens are read, and what stands behind them is not.

        Args:
            text: the whole text, or the whole system prompt where the cache is of one.
            reread: tokens behind each difference that are read again.

        Returns:
            What was replaced, by the tokens of the text as it was.

        Raises:
            InputError: the text has no tokens or more than the model has positions, or the states of the graph cannot
                be edited; see :meth:`graphopt.inference.decoding.decoder.Decoder.edit`. The cache is as it was then.
        """
        session, before = self.session, self.prompt
        after = _system_prompt(session, text) if before.system is not None else SavedPrompt(text, session.encode(text))
        _check_prompt(session, after)
        edits = edits_between(before.tokens, after.tokens, reread)
        self.decoder.edit(before.tokens, edits, reread=reread)
        self.decoder.keep()
        self.prompt = after
        if self._original is not None and edits:
            self._original = (self._original[0], min(self._original[1], edits[0].start))
        return edits

    def fork(self, prompts: Sequence[Sequence[int]]) -> tuple[Decoder, int]:
        """Return a decoder with a row for each prompt, and how many tokens of each its row has read.

        Args:
            prompts: the tokens of whole prompts. The last token of each is left to be fed: its logits choose the next.

        Raises:
            InputError: the states of the graph cannot be copied.
        """
        decoder = self.decoder.fork([0] * len(prompts))
        prefix = go_back(decoder, min(shared_length(self.prompt.tokens, prompt[:-1]) for prompt in prompts))
        return (decoder, prefix) if prefix is not None else (Decoder(self.session, len(prompts)), 0)

    def add(self, tokens: Sequence[int], decoder: Decoder) -> None:
        """Do nothing: what was run behind the prompt does not become part of it."""


def _check_prompt(session: Session, prompt: SavedPrompt) -> None:
    session.check_tokens(prompt.tokens)
    if not (prompt.text and prompt.tokens):
        raise InputError("the text to keep has no tokens", remedy="give a text that the tokenizer knows")


def _system_prompt(session: Session, system: str) -> SavedPrompt:
    """Return a system prompt as the chat template writes it, up to the first message of a user."""
    template, tokenizer = ChatTemplate.of_folder(session.file.parent), session.require_tokenizer()
    texts = [
        template.render([{"role": "system", "content": system}, {"role": "user", "content": message}])
        for message in ("a", "1")
    ]
    text = texts[0][: shared_length(*texts)]
    # a token that ends behind the shared text could hold letters of the message
    encodings = [tokenizer.encode(whole, add_special_tokens=False).ids for whole in texts]
    return SavedPrompt(text, encodings[0][: shared_length(*encodings)], system)


def shared_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many tokens, or letters, two texts have in common from the first on."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, pair in pairs if pair[0] != pair[1]), min(len(first), len(second)))


def go_back(decoder: Decoder, tokens: int) -> int | None:
    """Take all rows back to ``tokens`` tokens, or to fewer where states are kept only there.

    Returns:
        How many tokens each row has now; ``None`` where states that they would read again are overwritten.
    """
    tokens = decoder.nearest(tokens)
    if tokens < int(decoder.tokens.max()):
        try:
            decoder.rewind(tokens)
        except InputError:
            return None
    return tokens
