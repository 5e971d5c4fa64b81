"""Few cases for many parameters: where each choice has code of its own, and three of them together have none."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return tuples of one value of each axis, such that any two values of two axes are together in one of them.

    They are chosen greedily, the same ones every time: of 8 x 4 x 6 tuples 48 remain.
    """
    pair_sets = [
        frozenset(combinations(enumerate(indices), 2)) for indices in product(*(range(len(axis)) for axis in axes))
    ]
    missing, cases = frozenset().union(*pair_sets), []
    # what a tuple adds only becomes less, so most need not be counted again
    heap = [(-len(pairs), number) for number, pairs in enumerate(pair_sets)]
    while missing:
        negative_bound, number = heapq.heappop(heap)
        gain = len(pair_sets[number] & missing)
        if gain < -negative_bound:
            heapq.heappush(heap, (-gain, number))
            continue
        missing -= pair_sets[number]
        index_by_axis = dict(axis_index for pair in pair_sets[number] for axis_index in pair)
        cases.append(tuple(axis[index_by_axis[index]] for index, axis in enumerate(axes)))
    return cases
