"""Factors of Hessians: of wide ones half, in panels; the same numbers as of all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphopt.errors import InputError
from graphopt.numerics.formats import FORMATS
from graphopt.quantization.rounding import factors
from graphopt.quantization.rounding.factors import PanelFactor, WholeFactor, factor_of, solve_damped
from graphopt.quantization.rounding.methods.gptq import GPTQ
from tests.quantization.rounding.problems import correlated_inputs, loss, weights


@pytest.mark.parametrize("rows", [1, 7, 16, 50, 64])
def test_panels_hold_the_factor(rows: int) -> None:
    X = correlated_inputs(rows, 3 * rows, rows)
    order = np.random.default_rng(rows).permutation(rows)
    whole, panels = factor_of(X.T @ X, 0.01, order), PanelFactor(X.T @ X, 0.01, order, panel=16)
    assert isinstance(whole, WholeFactor)
    # float64 of a matrix whose condition number is at most 1 + rows / damping
    assert np.allclose(panels.weights, whole.weights, rtol=1e-9)
    columns, errors = 5, np.random.default_rng(1).standard_normal((rows, 5))
    errors_of_factors = [factor.errors(columns) for factor in (whole, panels)]
    for start in range(0, rows, 10):
        block = slice(start, min(start + 10, rows))
        upper = [np.triu(errors_of_factor.factor_block(block)) for errors_of_factor in errors_of_factors]
        # entries in float32
        assert np.allclose(*upper, rtol=1e-6, atol=1e-12)
        assert errors_of_factors[1].factor_block(block).flags.f_contiguous
        for earlier in {0, start // 2}:
            expected, result = (errors_of_factor.correction(earlier, block) for errors_of_factor in errors_of_factors)
            # sums of as many products as rows, of factors in float32
            scale = np.abs(whole.upper[:start, block]).sum(0).max(initial=1e-30) * np.abs(errors).max()
            assert np.abs(result - expected).max(initial=0) < 2e-7 * rows * scale
        for errors_of_factor in errors_of_factors:
            errors_of_factor.block(block)[:] = errors[block]
            errors_of_factor.keep(block)


@pytest.mark.parametrize(("name", "group"), [("int4", 16), ("t4", 256), ("int3", 150)])
def test_wide_matrices_lose_as_little(name: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    X, W = correlated_inputs(256, 600, 2), weights(256, 48, 2)
    H = (X.T @ X).astype(np.float32)

    def codes_of() -> Any:
        return GPTQ().round(W, FORMATS[name], group, "least_squares", scale_type=np.float32, statistics=H)

    whole = codes_of()
    monkeypatch.setattr(factors, "WIDE", 100)
    monkeypatch.setattr(factors, "_PANEL", 64)
    panels = codes_of()
    assert np.array_equal(panels.scales, whole.scales)
    # A number within float32's rounding of halfway between two codes may go the other way: 1 in some 10,000 did, and
    # the rows behind it in its column may follow.
    assert np.mean(panels.codes != whole.codes) < 0.02
    assert loss(W, panels, H) == pytest.approx(loss(W, whole, H), rel=1e-2)


def test_what_is_no_hessian_is_refused_and_too_little_damping_grows() -> None:
    order = np.arange(40)
    with pytest.raises(InputError, match="cannot be factored, with a damping of 1"):
        PanelFactor(5 * np.ones((40, 40)) - 4 * np.eye(40), 0.01, order, panel=16)
    with pytest.raises(InputError, match="NaN or infinite, the first at input 3"):
        PanelFactor(np.diag([1.0] * 3 + [np.nan] * 37), 0.01, order, panel=16)
    constant = np.ones((40, 40))
    assert np.isfinite(PanelFactor(constant, 1e-30, order, panel=16).weights).all()
    zeros = PanelFactor(np.zeros((40, 40)), 0.01, order, panel=16)
    assert np.array_equal(zeros.weights, np.ones(40))


@pytest.mark.parametrize(("rows", "columns", "threads"), [(1, 1, 1), (96, 300, 2), (97, 5, 1), (250, 257, 2)])
def test_damped_equations_are_solved_alike_by_any_number_of_threads(
    rows: int, columns: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, right = correlated_inputs(rows, 2 * rows, rows), weights(rows, columns, 3)
    H = (X.T @ X).astype(np.float32)
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    solution = solve_damped(H, 0.01, right)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert np.array_equal(solve_damped(H, 0.01, right), solution)
    damped_hessian = H.astype(np.float64)
    damped_hessian.reshape(-1)[:: rows + 1] += 0.01 * np.diagonal(damped_hessian).mean()
    # float64, and a condition number of at most 1 + rows / damping
    assert np.allclose(solution, np.linalg.solve(damped_hessian, right), rtol=0, atol=1e-9 * np.abs(solution).max())


def test_equations_of_no_hessian_are_refused() -> None:
    with pytest.raises(InputError, match=r"cannot be factored, with a damping of 1.*\[40, 40\]"):
        solve_damped(5 * np.ones((40, 40)) - 4 * np.eye(40), 0.01, np.ones((40, 1)))
    with pytest.raises(InputError, match="NaN or infinite, the first at input 3"):
        solve_damped(np.diag([1.0] * 3 + [np.nan] * 37), 0.01, np.ones((40, 1)))
