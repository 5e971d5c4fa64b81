"""Nested repeats in a string: ``e lm lm lm gm lm lm lm gm n h`` is ``e ((lm)x3 gm)x2 n h``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True)
class Repeat:
    """Equal parts, one behind the other.

    Attributes:
        start: where the first begins in the string.
        unit: what is repeated, as it stands in the first instance: places in the string, and repeats inside.
        length: letters of one instance.
        count: how many instances there are.
    """

    start: int
    unit: tuple[Part, ...]
    length: int
    count: int


Part = int | Repeat
"""A place in the string that is in no repeat, or a repeat."""


def repeats(letters: Sequence[int], is_start: Sequence[bool] | None = None) -> list[Part]:
    """Fold a string: the repeat that covers most, then what is before it, in it and behind it.

    Of repeats that cover equally much the one of the shortest period is taken, then one that begins where
    ``is_start``, then the first.

    Args:
        letters: the string; equal numbers are equal letters.
        is_start: for each place, whether a repeat should rather begin there; nowhere by default.
    """
    string = np.asarray(letters, np.int64)
    return list(_fold_string(string, np.asarray(is_start if is_start is not None else [False] * len(string), bool), 0))


def _fold_string(string: npt.NDArray[np.int64], is_start: npt.NDArray[np.bool_], offset: int) -> Iterator[Part]:
    best = max(_runs(string, is_start), default=None)
    if best is None:
        yield from range(offset, offset + len(string))
        return
    coverage, negative, _, before = best
    start, period = -before, -negative
    yield from _fold_string(string[:start], is_start[:start], offset)
    unit = slice(start, start + period)
    inner = tuple(_fold_string(string[unit], is_start[unit], offset + start))
    yield Repeat(offset + start, inner, period, coverage // period)
    end = start + coverage
    yield from _fold_string(string[end:], is_start[end:], offset + end)


def _runs(string: npt.NDArray[np.int64], is_start: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int, bool, int]]:
    """Yield the best of each run of equal letters: letters covered, -period, whether one may begin there, -start."""
    for period in range(1, len(string) // 2 + 1):
        equal = np.concatenate(([0], (string[period:] == string[:-period]).astype(np.int8), [0]))
        edges = np.diff(equal)
        for first, last in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
            length = int(last - first) + period  # letters of the run that has this period
            if length < 2 * period:
                continue
            coverage = length // period * period
            starts = range(int(first), int(first) + length - coverage + 1)
            start = next((begin for begin in starts if is_start[begin]), starts[0])
            yield coverage, -period, bool(is_start[start]), -start
