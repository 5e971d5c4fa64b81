"""A prompt and its continuation: how tokens are chosen, taken in and turned into text, and when the text ends.

    logits -> grammar's mask -> sampling -> token -> detokenizer -> stop strings -> text

It knows nothing of batches, caches and models; :mod:`graphopt.inference.generation` feeds what it has chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from graphopt.errors import InputError
from graphopt.inference.decoding.detokenize import TextStream
from graphopt.inference.decoding.logprobs import TokenLogprob, check_top, token_logprob
from graphopt.inference.decoding.sampling import GREEDY, Sampling
from graphopt.inference.decoding.stop_strings import StopStrings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from graphopt.inference.decoding.grammar import Grammar
    from graphopt.inference.session import Session

StopReason = Literal["end of text", "stop string", "length", "positions", "interrupted"]

_AT_LENGTH: StopReason = "length"
_AT_POSITIONS: StopReason = "positions"
_ENDLESS = 1 << 62


@dataclass(frozen=True)
class Settings:
    """How prompts are continued.

    Attributes:
        max_new_tokens: tokens to make for each prompt, at most; ``None`` for as many as the model has positions.
        sampling: how tokens are chosen.
        stop: strings that end a text; the text ends before the first of them.
        grammar: the form that the text must have.
        logprobs: how many of the most likely tokens to list beside each chosen one, 0 for the chosen one alone;
            ``None`` to compute no log probabilities.
        eos: tokens that end a text, beside those that the model states.

    Raises:
        InputError: ``max_new_tokens`` is below 1, ``logprobs`` below 0, or a stop string is empty.
    """

    max_new_tokens: int | None = 64
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None
    logprobs: int | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens cannot be {self.max_new_tokens}", remedy="ask for 1 or more")
        check_top(self.logprobs)
        StopStrings(self.stop)


@dataclass(frozen=True)
class StepOutput:
    """What one step adds.

    Attributes:
        token: the new token, or ``None`` where the text has ended without one.
        text: the text that it completes.
        logprob: of the token, where that was asked for.
    """

    token: int | None = None
    text: str = ""
    logprob: TokenLogprob | None = None


@dataclass
class Continuation:
    """One text while it grows; made by :func:`start`.

    Attributes:
        session: the model.
        settings: how it is continued.
        prompt: its first tokens.
        tokens: its new tokens, without the one that ended it.
        text: the text of the new tokens; empty without a tokenizer.
        logprobs: of the new tokens, where that was asked for.
        stop_reason: why it has ended, or ``None`` while it continues.
        hidden: the hidden state [width] that the newest token was chosen by, where the model gives it.
    """

    session: Session
    settings: Settings
    prompt: list[int]
    limit: int
    stopped_at_limit: StopReason
    random: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stop_reason: StopReason | None = None
    hidden: npt.NDArray[np.floating] | None = None

    def __post_init__(self) -> None:
        self.eos = frozenset((*self.session.manifest.model.eos_token_ids, *self.settings.eos))
        self._stops = StopStrings(self.settings.stop)
        self._stream = None if self.session.tokenizer is None else TextStream(self.session, self.prompt)
        if self.settings.stop:
            self.session.require_tokenizer()
        grammar = self.settings.grammar
        self._matcher = None if grammar is None else grammar.matcher(self.session, sorted(self.eos))

    def step(self, logits: npt.NDArray[np.floating]) -> StepOutput:
        """Choose the next token by the logits of the newest one, [vocabulary], and take it in."""
        if self.stop_reason is not None:
            return StepOutput()
        candidates = logits if self._matcher is None else self._matcher.mask_logits(logits)
        token = self.settings.sampling.choose(candidates, self.random)
        if token in self.eos:
            self.stop_reason = "end of text"
            return StepOutput(text=self._finish())
        self.tokens.append(token)
        logprob = None
        if self.settings.logprobs is not None:
            logprob = token_logprob(self.session, logits, token, self.settings.logprobs)
            self.logprobs.append(logprob)
        if len(self.tokens) == self.limit:
            self.stop_reason = self.stopped_at_limit
        if self._matcher is not None:
            self._matcher.take(token)
            if self._matcher.complete:
                self.stop_reason = "end of text"
        piece = "" if self._stream is None else self._stops.push(self._stream.push(token))
        self.text += piece
        if self._stops.match is not None:
            self.stop_reason = "stop string"
        elif self.stop_reason is not None:
            piece += self._finish()
        return StepOutput(token, piece, logprob)

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, the grammar allows next: all of them without one."""
        return len(tokens) if self._matcher is None else self._matcher.count_allowed(tokens)

    def forced_tokens(self) -> list[int]:
        """Return the tokens that spell what the grammar leaves no choice about; none without a grammar."""
        return [] if self._matcher is None or self.stop_reason is not None else self._matcher.forced_tokens()

    def interrupt(self) -> StepOutput:
        """End it here."""
        if self.stop_reason is not None:
            return StepOutput()
        self.stop_reason = "interrupted"
        return StepOutput(text=self._finish())

    def _finish(self) -> str:
        """Return the text that was held back, now that no more tokens come."""
        remainder = "" if self._stream is None else self._stops.push(self._stream.finish())
        if self._stops.match is None:
            remainder += self._stops.finish()
        self.text += remainder
        return remainder


def start(
    session: Session, prompt: Sequence[int], settings: Settings, *, name: str, occurrence: int = 0
) -> Continuation:
    """Return the continuation of a prompt.

    Args:
        session: the model.
        prompt: its tokens.
        settings: how to continue it.
        name: what to call the prompt in errors.
        occurrence: how many rows before this one have the same prompt, see :meth:`Sampling.stream`.

    Raises:
        InputError: the prompt has no tokens, more than the model has positions, or an unknown one; there is no
            tokenizer for stop strings or a grammar; or the grammar cannot be used.
    """
    ids = list(prompt)
    session.check_tokens(ids)
    if not ids:
        raise InputError(f"{name} has no tokens", remedy="give it a text that the tokenizer knows")
    room, max_new = session.max_positions, settings.max_new_tokens
    if room is not None:
        if len(ids) > room:
            raise InputError(
                f"{name} has {len(ids)} tokens, and the model only {room} positions",
                file=session.file,
                remedy="shorten the prompt",
            )
        # The last token is chosen but never fed, so it takes no position.
        room += 1 - len(ids)
    limit, at_limit = _ENDLESS if max_new is None else max_new, _AT_LENGTH
    if room is not None and room < limit:
        limit, at_limit = room, _AT_POSITIONS
    return Continuation(session, settings, ids, limit, at_limit, settings.sampling.stream(ids, occurrence))
