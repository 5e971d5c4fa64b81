"""Few cases for many parameters: where each choice has code of its own, and three of them together have none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return tuples of one value of each axis, such that any two values of two axes are together in one of them.

    They are chosen greedily, the same ones every time: of 8 x 4 x 6 tuples 48 remain.
    """
    every = [frozenset(combinations(enumerate(places), 2)) for places in product(*(range(len(axis)) for axis in axes))]
    missing, chosen = frozenset().union(*every), []
    while missing:
        best = max(every, key=lambda pairs: len(pairs & missing))
        missing -= best
        places = dict(place for pair in best for place in pair)
        chosen.append(tuple(axis[places[index]] for index, axis in enumerate(axes)))
    return chosen
