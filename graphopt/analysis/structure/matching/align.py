"""The segments of two graphs side by side, in order: which of the one is which of the other.

    before   e  A  M  A  M  A  M  n  h
    after    e  A  M  A' M     .  n  h      one attention changed, one layer gone

The alignment with the highest sum of similarities is found by dynamic programming (Needleman and Wunsch, 1970). Weights
that are the same count most: of 32 layers of one structure they say which is gone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from graphopt.analysis.structure.matching.side import Side

_STRUCTURE, _WEIGHTS, _ENDS = 1.0, 2.0, 0.01
_ALIKE = 0.5
"""Share of operators that two segments must have in common to be aligned."""


@dataclass(frozen=True)
class _Segment:
    structure: int
    operators: Counter[Hashable]
    weights: frozenset[Hashable]


def aligned(before: Side, after: Side) -> list[tuple[int, int]]:
    """Return pairs of segments, by their numbers, in order."""
    ours, theirs = _segments(before), _segments(after)
    # What is the same at both ends needs no search.
    shorter = min(len(ours), len(theirs))
    head = next((n for n in range(shorter) if ours[n] != theirs[n]), shorter)
    tail = next((n for n in range(shorter - head) if ours[-1 - n] != theirs[-1 - n]), shorter - head)
    ends = [len(each) - tail for each in (ours, theirs)]
    inner = _inner(ours[head : ends[0]], theirs[head : ends[1]])
    return [
        *((n, n) for n in range(head)),
        *((row + head, column + head) for row, column in inner),
        *((ends[0] + n, ends[1] + n) for n in range(tail)),
    ]


def _inner(ours: Sequence[_Segment], theirs: Sequence[_Segment]) -> list[tuple[int, int]]:
    similar = _similarities(ours, theirs)
    scores = np.zeros((len(ours) + 1, len(theirs) + 1))
    for row in range(len(ours)):
        diagonal = scores[row, :-1] + similar[row]
        # A cell is the largest of what is left of it, above it, and on its diagonal.
        scores[row + 1, 1:] = np.maximum.accumulate(np.maximum(scores[row, 1:], diagonal))
    return _path(scores, similar)


def _path(scores: npt.NDArray[np.float64], similar: npt.NDArray[np.float64]) -> list[tuple[int, int]]:
    row, column = similar.shape
    found = []
    while row and column:
        if similar[row - 1, column - 1] > 0 and np.isclose(
            scores[row, column], scores[row - 1, column - 1] + similar[row - 1, column - 1], rtol=0, atol=1e-9
        ):
            row, column = row - 1, column - 1
            found.append((row, column))
        elif scores[row, column] == scores[row - 1, column]:
            row -= 1
        else:
            column -= 1
    return found[::-1]


def _segments(side: Side) -> Sequence[_Segment]:
    found = []
    for number, segment in enumerate(side.folded.segments):
        nodes = [node for node in segment.nodes if node not in side.constant]
        weights = frozenset(
            side.constant_key(value)
            for node in nodes
            for _, value in side.inputs(node)
            if value.is_initializer() and value.const_value is not None and value.const_value.size > 1
        )
        operators = Counter(side.does(node) for node in nodes)
        found.append(_Segment(side.folded.structures[number], operators, weights))
    return found


def _similarities(ours: Sequence[_Segment], theirs: Sequence[_Segment]) -> npt.NDArray[np.float64]:
    """Return for each pair of segments how alike they are; 0 for those that are not to be aligned."""
    readers: dict[Hashable, list[int]] = {}
    for column, segment in enumerate(theirs):
        for weight in segment.weights:
            readers.setdefault(weight, []).append(column)
    kinds: dict[tuple[int, int], float] = {}
    found = np.zeros((len(ours), len(theirs)))
    for row, segment in enumerate(ours):
        shared = Counter(column for weight in segment.weights for column in readers.get(weight, ()))
        for column, other in enumerate(theirs):
            pair = segment.structure, other.structure
            alike = kinds.get(pair)
            if alike is None:
                alike = kinds[pair] = _alike(segment.operators, other.operators)
            if alike >= _ALIKE:
                same = shared[column] / max(1, len(segment.weights), len(other.weights))
                found[row, column] = _ENDS + _STRUCTURE * (pair[0] == pair[1]) + _WEIGHTS * same + alike / 2
    return found


def _alike(ours: Counter[Hashable], theirs: Counter[Hashable]) -> float:
    return (ours & theirs).total() / max(1, ours.total(), theirs.total())
