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
    every = [frozenset(combinations(enumerate(places), 2)) for places in product(*(range(len(axis)) for axis in axes))]
    missing, chosen = frozenset().union(*every), []
    # what a tuple adds only becomes less, so most need not be counted again
    heap = [(-len(pairs), number) for number, pairs in enumerate(every)]
    while missing:
        most, number = heapq.heappop(heap)
        added = len(every[number] & missing)
        if added < -most:
            heapq.heappush(heap, (-added, number))
            continue
        missing -= every[number]
        places = dict(place for pair in every[number] for place in pair)
        chosen.append(tuple(axis[places[index]] for index, axis in enumerate(axes)))
    return chosen
