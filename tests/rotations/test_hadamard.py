from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.rotations.hadamard import hadamard, has_hadamard


@pytest.mark.parametrize("n", [n for n in range(1, 400) if has_hadamard(n)])
def test_rows_are_orthogonal_in_integers(n: int) -> None:
    matrix = hadamard(n).astype(np.int64)
    assert set(np.unique(matrix)) <= {-1, 1}
    assert np.array_equal(matrix @ matrix.T, n * np.eye(n, dtype=np.int64))


def test_orders_that_paley_and_sylvester_reach_below_100() -> None:
    # 52 = 2 (5^2 + 1) needs Paley over a field that is no prime's, and 92 needs Williamson (or more).
    assert [n for n in range(4, 100, 4) if not has_hadamard(n)] == [52, 92]


@given(st.integers(3, 10_000).filter(lambda n: n % 4 != 0))
def test_no_order_that_cannot_exist(n: int) -> None:
    assert not has_hadamard(n)


@pytest.mark.parametrize("n", [0, 3, 6, 92])
def test_refuses_what_it_cannot_construct(n: int) -> None:
    with pytest.raises(ValueError, match=f"order {n}"):
        hadamard(n)


def test_matrices_are_shared_and_so_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        hadamard(12)[0, 0] = 5
