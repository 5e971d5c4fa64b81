"""The branch for what rounding lost: against the singular values of the definition, for odd errors and statistics."""

from __future__ import annotations

import numpy as np
import pytest

from graphopt.errors import InputError
from graphopt.quantization.rounding.low_rank import low_rank
from tests.quantization.rounding.problems import correlated_inputs

DAMPING = 0.01


def hessian_of(rows: int, seed: int = 0) -> np.ndarray:
    inputs = correlated_inputs(rows, 4 * rows, seed)
    return (inputs.T @ inputs / len(inputs)).astype(np.float32)


def loss(error: np.ndarray, hessian: np.ndarray) -> float:
    """Return the squared norm of X E with the damping that the branch is chosen with."""
    H = hessian.astype(np.float64) + DAMPING * np.diagonal(hessian).mean() * np.eye(len(hessian))
    return float(np.einsum("kn,kl,ln->", error, H, error))


@pytest.mark.parametrize(("rows", "columns"), [(48, 32), (32, 80)])
@pytest.mark.parametrize("rank", [1, 4, 16])
def test_the_error_is_about_the_least_of_any_branch(rows: int, columns: int, rank: int) -> None:
    error, H = np.random.default_rng(rank).standard_normal((rows, columns)) * 0.01, hessian_of(rows)
    left, right = low_rank(error, H, rank)
    assert (left.dtype, right.dtype) == (np.float16, np.float16)
    assert (left.shape, right.shape) == ((rows, rank), (rank, columns))
    left_over = loss(error - left.astype(np.float64) @ right, H)
    damped_hessian = H.astype(np.float64) + DAMPING * np.diagonal(H).mean() * np.eye(rows)
    values = np.linalg.svd(np.linalg.cholesky(damped_hessian).T @ error, compute_uv=False)
    # Eckart and Young; the iteration takes about the strongest, and float16 rounds both sides to 2^-11
    assert values[rank:].__pow__(2).sum() * (1 - 1e-9) <= left_over < values[rank:].__pow__(2).sum() * 1.02


def test_an_error_of_few_directions_is_gone() -> None:
    random = np.random.default_rng(0)
    error = random.standard_normal((40, 3)) @ random.standard_normal((3, 24))
    H = hessian_of(40)
    left, right = low_rank(error, H, 8)
    assert loss(error - left.astype(np.float64) @ right, H) < 1e-5 * loss(error, H)  # squares of 2^-11


@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e30])
def test_the_scale_of_the_statistics_does_not_matter(factor: float) -> None:
    error, H = np.random.default_rng(1).standard_normal((24, 16)) * 1e-3, hessian_of(24).astype(np.float64)
    left, right = low_rank(error, H * factor, 4)
    expected = low_rank(error, H, 4)
    # both sides are stored in float16: errors of 1e-3 are off by 2^-11 of that
    assert np.abs(left.astype(np.float64) @ right - expected[0].astype(np.float64) @ expected[1]).max() < 1e-6


def test_odd_errors() -> None:
    H = hessian_of(16)
    for error in (np.zeros((16, 8)), np.full((16, 8), 5e-324)):
        left, right = low_rank(error, H, 4)
        assert not (left.astype(np.float64) @ right).any()
    left, right = low_rank(np.random.default_rng(0).standard_normal((16, 3)), np.zeros((16, 16)), 8)
    assert not left[:, 3:].any()  # more directions than the error has
    assert not right[3:].any()
    left, right = low_rank(np.full((16, 8), 1e30), H, 2)  # beyond float16: cut off, and finite
    assert np.isfinite(left).all()
    assert np.isfinite(right).all()
    with pytest.raises(InputError, match="cannot be factored"):
        low_rank(np.ones((4, 2)), np.diag([3.0, -1.0, 1.0, 1.0]), 1)
