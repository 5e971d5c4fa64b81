"""Echo and induction heads, found as RazorAttention does: by random tokens that repeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphopt.compile.calibration.mass import attention

if TYPE_CHECKING:
    from graphopt.compile.calibration.tap import Heads
    from graphopt.tasks.ports import IntArray

REPEATS = 4
LARGEST_BLOCK = 2500


@dataclass(frozen=True)
class Repetition:
    """Random tokens that repeat: what they mean says nothing, only where they stood before.

    RazorAttention (Tang et al. 2024, section 3.2) repeats 2500 random tokens 4 times. A head that answers the current
    token with attention to its earlier occurrences is an echo head, one with attention to the tokens behind those an
    induction head (Olsson et al. 2022). Here the tokens of a block differ from one another, so that there are no other
    occurrences; the block is as long as the model's positions allow; and of the last repeat some queries are measured,
    evenly spaced, as every one of them has as many earlier occurrences.

    Attributes:
        ids: the sequence, int64 [length]: what the tokenizer sets before a text, then the repeats.
        block: tokens that repeat.
    """

    ids: IntArray
    block: int

    @classmethod
    def draw(cls, beginning: tuple[int, ...], vocabulary: int, positions: int, seed: int = 0) -> Repetition:
        """Draw a sequence of at most ``positions`` tokens, which must leave room for 4 repeats of 2."""
        block = min(LARGEST_BLOCK, vocabulary, (positions - len(beginning)) // REPEATS)
        block_ids = np.random.default_rng(seed).choice(vocabulary, block, replace=False)
        return cls(np.array([*beginning, *np.tile(block_ids, REPEATS)], np.int64), block)

    def query_positions(self, queries: int) -> IntArray:
        """Return positions of the last repeat, at most ``queries`` of them; its last token has no successor yet."""
        first, end = len(self.ids) - self.block, len(self.ids) - 1
        positions: IntArray = np.unique(np.linspace(first, end - 1, queries).astype(np.int64))
        return positions


def echo_and_induction(
    heads: Heads, head: int, repetition: Repetition, query_positions: IntArray
) -> npt.NDArray[np.float64]:
    """Return the echo and the induction score of each query head of a KV head: float64 [2, G], from 0 to 1.

    The score is the attention on all earlier occurrences, or on what follows them, mean over the queries at
    ``query_positions``.
    """
    weights, _ = attention(heads, head, query_positions)
    rows = np.arange(len(query_positions))[:, None]
    earlier = query_positions[:, None] - repetition.block * np.arange(1, REPEATS)
    scores: npt.NDArray[np.float64] = np.array(
        [weights[rows, :, earlier + ahead].sum(axis=1).mean(axis=0) for ahead in (0, 1)]
    )
    return np.minimum(scores, 1)
