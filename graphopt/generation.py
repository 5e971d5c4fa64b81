"""Text from a model: prompts in, tokens out, one step at a time for the whole batch.

Prompts of different length share a batch by padding on the left, so that the last column is every row's newest token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from graphopt.decoding.decoder import Decoder, Logits
from graphopt.decoding.detokenize import TextStream
from graphopt.decoding.sampling import GREEDY, Sampling
from graphopt.errors import InputError
from graphopt.session import Session
from graphopt.tasks.ports import IntArray

Prompt = str | Sequence[int]
Stopped = Literal["end of text", "length", "positions"]

_AHEAD = 512
"""New tokens that a cache in pages reserves room for in advance, at most: a text may end before."""

_AT_LENGTH: Stopped = "length"
_AT_POSITIONS: Stopped = "positions"


class Completion(BaseModel):
    """The completion of one prompt.

    Attributes:
        prompt: the tokens of the prompt.
        tokens: the new tokens, without the token that ended the text.
        text: the text of the new tokens, such that prompt and text can be joined; ``None`` without a tokenizer.
        stopped: why there are no more: the model ended the text, ``max_new_tokens`` is reached, or the model has no
            position left.
    """

    model_config = ConfigDict(frozen=True)

    prompt: list[int]
    tokens: list[int]
    text: str | None
    stopped: Stopped


@dataclass(frozen=True)
class Step:
    """The result of one step, by row.

    Attributes:
        tokens: the new token, or ``None`` where the row has ended, now or before.
        texts: the text that the token completes; characters whose last bytes are still missing are held back.
        stopped: why the row has ended, or ``None`` while it continues.
    """

    tokens: tuple[int | None, ...]
    texts: tuple[str, ...]
    stopped: tuple[Stopped | None, ...]


@dataclass
class _Row:
    """One sequence of the batch while it grows."""

    prompt: list[int]
    limit: int
    stopped_at_limit: Stopped
    random: np.random.Generator
    stream: TextStream | None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    stopped: Stopped | None = None

    def take(self, token: int, eos: Sequence[int]) -> tuple[int | None, str]:
        """Add a token, or end; return the token that was added and the text that it completed."""
        added = None if token in eos else token
        piece = ""
        if added is None:
            self.stopped = "end of text"
        else:
            self.tokens.append(token)
            if len(self.tokens) == self.limit:
                self.stopped = self.stopped_at_limit
        if self.stream is not None:
            piece += self.stream.push(token) if added is not None else ""
            piece += self.stream.finish() if self.stopped is not None else ""
        self.text += piece
        return added, piece


def generate(
    session: Session,
    prompts: str | Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    sampling: Sampling = GREEDY,
) -> list[Completion]:
    """Complete each prompt; see :func:`stream` for the arguments and errors."""
    rows = _rows(session, prompts, max_new_tokens, sampling)
    for _ in _steps(session, rows, sampling):
        pass
    return [
        Completion(
            prompt=row.prompt,
            tokens=row.tokens,
            text=None if row.stream is None else row.text,
            stopped=row.stopped or row.stopped_at_limit,
        )
        for row in rows
    ]


def stream(
    session: Session,
    prompts: str | Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    sampling: Sampling = GREEDY,
) -> Iterator[Step]:
    """Complete the prompts step by step; arguments are checked at once, the model runs as the steps are consumed.

    Args:
        session: the model.
        prompts: texts, or lists of tokens; a text gets the BOS token that its tokenizer adds, a list is used as it is.
        max_new_tokens: tokens to make for each prompt, at most.
        sampling: how tokens are chosen.

    Raises:
        InputError: a prompt is empty, longer than the model's positions or holds an unknown token; ``max_new_tokens``
            is below 1; there is a text but no tokenizer; prompts differ in length and the graph has no
            ``attention_mask``.
    """
    return _steps(session, _rows(session, prompts, max_new_tokens, sampling), sampling)


def _rows(session: Session, prompts: str | Sequence[Prompt], max_new_tokens: int, sampling: Sampling) -> list[_Row]:
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens cannot be {max_new_tokens}", remedy="ask for 1 or more")
    rows: list[_Row] = []
    seen: Counter[tuple[int, ...]] = Counter()
    for number, prompt in enumerate([prompts] if isinstance(prompts, str) else prompts, start=1):
        if len(prompt) == 0:
            raise InputError(f"prompt {number} is empty", remedy="give it a text or at least one token")
        ids = session.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        session.check_tokens(ids)
        if not ids:
            raise InputError(f"prompt {number} has no tokens", remedy="give it a text that the tokenizer knows")
        limit, at_limit = max_new_tokens, _AT_LENGTH
        if session.max_positions is not None:
            if len(ids) > session.max_positions:
                raise InputError(
                    f"prompt {number} has {len(ids)} tokens, and the model only {session.max_positions} positions",
                    file=session.file,
                    remedy="shorten the prompt",
                )
            # The last token is chosen but never fed, so it takes no position.
            room = session.max_positions - len(ids) + 1
            if room < limit:
                limit, at_limit = room, _AT_POSITIONS
        key = tuple(ids)
        text_stream = None if session.tokenizer is None else TextStream(session, ids)
        rows.append(_Row(ids, limit, at_limit, sampling.stream(ids, seen[key]), text_stream))
        seen[key] += 1
    if not rows:
        raise InputError("there is no prompt", remedy="give at least one")
    if len({len(row.prompt) for row in rows}) > 1 and not session.interface.takes_padding:
        raise InputError(
            session.interface.why_no_padding,
            file=session.file,
            remedy="run the prompts one by one, or export the model with a mask",
        )
    return rows


def _steps(session: Session, rows: Sequence[_Row], sampling: Sampling) -> Iterator[Step]:
    decoder = Decoder(session, len(rows), expected=max(len(row.prompt) + min(row.limit, _AHEAD) for row in rows))
    eos = session.manifest.model.eos_token_ids
    mask: IntArray | None
    ids, mask = _padded_left([row.prompt for row in rows])
    while True:
        newest: Logits = np.empty((0, 0), np.float32)
        for _, logits in decoder.feed(ids, mask):
            newest = logits[:, -1]
        taken = [
            row.take(sampling.choose(values, row.random), eos) if row.stopped is None else (None, "")
            for row, values in zip(rows, newest, strict=True)
        ]
        tokens, texts = zip(*taken, strict=True)
        yield Step(tokens, texts, tuple(row.stopped for row in rows))
        if all(row.stopped is not None for row in rows):
            return
        # A row that has ended stays in the batch; its mask of 0 takes no position and hides the tokens fed for it.
        ids = np.array([[0 if token is None else token] for token in tokens], np.int64)
        live = [row.stopped is None for row in rows]
        mask = None if all(live) else np.array(live, np.int64)[:, None]


def _padded_left(prompts: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """Return tokens and mask [batch, longest], each prompt at the right end of its row."""
    longest = max(map(len, prompts))
    ids, mask = np.zeros((2, len(prompts), longest), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return ids, mask
