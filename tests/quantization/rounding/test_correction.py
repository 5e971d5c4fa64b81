"""Systems that corrected matrices solve."""

from __future__ import annotations

import numpy as np
import pytest

from graphopt.quantization.rounding.correction import solve_positive


@pytest.mark.parametrize("rows", [1, 130, 300])
def test_positive_systems_are_solved_panel_by_panel(rows: int) -> None:
    random = np.random.default_rng(0)
    factor, right = random.normal(size=(rows, 2 * rows + 8)), random.normal(size=(rows, 7)).astype(np.float32)
    matrix = (factor @ factor.T).astype(np.float32)
    # Eigenvalues of such a matrix lie within a factor of 34 (Marchenko and Pastur): 34 roundings of 6e-8, with room.
    expected = np.linalg.solve(matrix.astype(np.float64), right)
    assert np.abs(solve_positive(matrix, right) - expected).max() <= 1e-5 * np.abs(expected).max()


def test_what_float32_cannot_factor_is_solved_in_float64() -> None:
    random = np.random.default_rng(0)
    matrix, right = np.diag(random.normal(size=200)).astype(np.float32), random.normal(size=(200, 3)).astype(np.float32)
    before = matrix.copy(), right.copy()
    assert np.array_equal(solve_positive(matrix, right), np.linalg.solve(matrix, right))
    assert np.array_equal(matrix, before[0])
    assert np.array_equal(right, before[1])
