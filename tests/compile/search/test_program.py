from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.compile.search.program import solve
from graphopt.errors import InputError

pytest.importorskip("scipy")  # of the extra `search`


@given(
    table=st.lists(
        st.lists(st.tuples(st.floats(0, 10), st.integers(1, 1000)), min_size=1, max_size=3), min_size=1, max_size=5
    ),
    share=st.floats(0, 1),
)
@settings(max_examples=10, deadline=None)
def test_it_is_the_best_of_all_combinations(table: list[list[tuple[float, int]]], share: float) -> None:
    losses, sizes = [[entry[0] for entry in row] for row in table], [[entry[1] for entry in row] for row in table]
    smallest, largest = (sum(extreme(row) for row in sizes) for extreme in (min, max))
    room = smallest + int(share * (largest - smallest))
    solution = solve(losses, sizes, room)
    assert sum(row[choice] for row, choice in zip(sizes, solution, strict=True)) <= room
    loss = sum(row[choice] for row, choice in zip(losses, solution, strict=True))
    best = min(
        sum(row[choice] for row, choice in zip(losses, choices, strict=True))
        for choices in itertools.product(*(range(len(row)) for row in table))
        if sum(row[choice] for row, choice in zip(sizes, choices, strict=True)) <= room
    )
    # the solver stops within 1e-4 of the best, and takes a loss below 1e-6 of the largest for none
    assert loss <= best * (1 + 1e-4) + 1e-5 * max(map(max, losses))


def test_too_few_bytes_are_refused() -> None:
    with pytest.raises(InputError, match="the smallest choices take 30 bytes, and there is room for 29"):
        solve([[1.0, 0.5], [1.0]], [[10, 20], [20]], 29)
