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
_LEAST_SIMILARITY = 0.5
"""Share of operators that two segments must have in common to be aligned."""


@dataclass(frozen=True)
class _Segment:
    structure: int
    operators: Counter[Hashable]
    weights: frozenset[Hashable]


def align_segments(before: Side, after: Side) -> list[tuple[int, int]]:
    """Return pairs of segments, by their numbers, in order."""
    segments, twins = _segments(before), _segments(after)
    # What is the same at both ends needs no search.
    shorter = min(len(segments), len(twins))
    head = next((n for n in range(shorter) if segments[n] != twins[n]), shorter)
    tail = next((n for n in range(shorter - head) if segments[-1 - n] != twins[-1 - n]), shorter - head)
    ends = [len(string) - tail for string in (segments, twins)]
    inner = _inner(segments[head : ends[0]], twins[head : ends[1]])
    return [
        *((n, n) for n in range(head)),
        *((row + head, column + head) for row, column in inner),
        *((ends[0] + n, ends[1] + n) for n in range(tail)),
    ]


def _inner(before: Sequence[_Segment], after: Sequence[_Segment]) -> list[tuple[int, int]]:
    similar = _similarities(before, after)
    scores = np.zeros((len(before) + 1, len(after) + 1))
    for row in range(len(before)):
        diagonal = scores[row, :-1] + similar[row]
        # A cell is the largest of what is left of it, above it, and on its diagonal.
        scores[row + 1, 1:] = np.maximum.accumulate(np.maximum(scores[row, 1:], diagonal))
    return _path(scores, similar)


def _path(scores: npt.NDArray[np.float64], similar: npt.NDArray[np.float64]) -> list[tuple[int, int]]:
    row, column = similar.shape
    pairs = []
    while row and column:
        if similar[row - 1, column - 1] > 0 and np.isclose(
            scores[row, column], scores[row - 1, column - 1] + similar[row - 1, column - 1], rtol=0, atol=1e-9
        ):
            row, column = row - 1, column - 1
            pairs.append((row, column))
        elif scores[row, column] == scores[row - 1, column]:
            row -= 1
        else:
            column -= 1
    return pairs[::-1]


def _segments(side: Side) -> Sequence[_Segment]:
    segments = []
    for number, segment in enumerate(side.folding.segments):
        nodes = [node for node in segment.nodes if node not in side.constant]
        weights = frozenset(
            side.constant_key(value)
            for node in nodes
            for _, value in side.inputs(node)
            if value.is_initializer() and value.const_value is not None and value.const_value.size > 1
        )
        operators = Counter(side.operation(node) for node in nodes)
        segments.append(_Segment(side.folding.structures[number], operators, weights))
    return segments


def _similarities(before: Sequence[_Segment], after: Sequence[_Segment]) -> npt.NDArray[np.float64]:
    """Return for each pair of segments how alike they are; 0 for those that are not to be aligned."""
    readers: dict[Hashable, list[int]] = {}
    for column, segment in enumerate(after):
        for weight in segment.weights:
            readers.setdefault(weight, []).append(column)
    kinds: dict[tuple[int, int], float] = {}
    similarities = np.zeros((len(before), len(after)))
    for row, segment in enumerate(before):
        counts = Counter(column for weight in segment.weights for column in readers.get(weight, ()))
        for column, twin in enumerate(after):
            pair = segment.structure, twin.structure
            similarity = kinds.get(pair)
            if similarity is None:
                similarity = kinds[pair] = _similarity(segment.operators, twin.operators)
            if similarity >= _LEAST_SIMILARITY:
                share = counts[column] / max(1, len(segment.weights), len(twin.weights))
                similarities[row, column] = (
                    _ENDS + _STRUCTURE * (pair[0] == pair[1]) + _WEIGHTS * share + similarity / 2
                )
    return similarities


def _similarity(before: Counter[Hashable], after: Counter[Hashable]) -> float:
    return (before & after).total() / max(1, before.total(), after.total())
