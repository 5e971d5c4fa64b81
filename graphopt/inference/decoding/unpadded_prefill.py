"""When prompts of different length are fed one after the other, and not side by side with padding.

    side by side    8 prompts of 100 to 1000 tokens: 8 x 1000 columns, of which half are padding
    apart           the tokens that there are

Prepacking (Zhao et al., 2024, arXiv:2404.09529) packs prompts into one row for that. Where each row of states in pages
lies by itself, a step of one row writes there as well, and no mask is needed between prompts. Kernels are as fast for
the rows of one prompt as for those of several once there are some tens of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from graphopt.tasks.ports import IntArray

Floats = npt.NDArray[np.floating]

_MIN_COST = 32
"""Tokens below which a prompt by itself costs hardly less: kernels do their best with some tens of rows."""

_SHARE = 0.8
"""Of the columns with padding, that tokens may be for prompts to go apart."""


def is_faster_unpadded(mask: IntArray) -> bool:
    """Return whether prompts are fed faster one after the other.

    Args:
        mask: 1 for a token, 0 for padding, [batch, length].
    """
    batch = len(mask)
    counts: list[int] = mask.sum(axis=1).tolist()
    cost = sum(max(count, _MIN_COST) for count in counts)
    return batch > 1 and cost < _SHARE * mask.size


class RowDecoder(Protocol):
    """A decoder of one row, see :class:`graphopt.inference.decoding.decoder.Decoder`."""

    hidden: Floats | None

    @property
    def tokens(self) -> IntArray:
        """Tokens that the row has stored, int64 [1]."""

    def feed(self, input_ids: IntArray) -> Iterator[tuple[int, Floats]]:
        """Feed new tokens [1, length] piece by piece, and yield the logits of each."""


@dataclass(frozen=True)
class Prefill:
    """What rows were fed so far; numbers are 0 where a row was not.

    Attributes:
        tokens: of each row, int64 [batch].
        logits: of the newest token of each row, [batch, 1, vocabulary].
        hidden: its last hidden state [batch, 1, width], where the model gives it.
    """

    tokens: IntArray
    logits: Floats
    hidden: Floats | None


def feed_rows(decoders: Iterable[RowDecoder], input_ids: IntArray, mask: IntArray) -> Iterator[Prefill]:
    """Feed prompts one after the other, each piece by piece, and yield behind each piece.

    Args:
        decoders: of each row, with states that are a part of the batch's.
        input_ids: the tokens, [batch, length], each prompt at the right end of its row.
        mask: 1 for a token, 0 for padding, [batch, length].
    """
    batch, length = input_ids.shape
    tokens, newest, states = np.zeros(batch, np.int64), None, None
    for row, (count, decoder) in enumerate(zip(mask.sum(axis=1).tolist(), decoders, strict=True)):
        for _, logits in decoder.feed(input_ids[row : row + 1, length - count :]) if count else ():
            newest = _write_row(newest, logits, batch, row)
            states = None if decoder.hidden is None else _write_row(states, decoder.hidden, batch, row)
            tokens[row] = decoder.tokens[0]
            yield Prefill(tokens.copy(), newest, states)


def _write_row(rows: Floats | None, positions: Floats, batch: int, row: int) -> Floats:
    """Write the last position of ``positions`` [1, positions, width] to a row of ``rows`` [batch, 1, width]."""
    if rows is None:
        rows = np.zeros((batch, 1, positions.shape[-1]), positions.dtype)
    rows[row, 0] = positions[0, -1]
    return rows
