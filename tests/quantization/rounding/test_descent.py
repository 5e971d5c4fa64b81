from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.numerics.formats import FORMATS
from graphopt.quantization.rounding import QuantizedMatrix, round_to_nearest
from graphopt.quantization.rounding.descent import polish
from graphopt.quantization.rounding.methods.gptq import GPTQ
from tests.quantization.rounding.problems import correlated_inputs, loss, weights


def damped_hessian(hessian: np.ndarray, damping: float = 0.01) -> np.ndarray:
    mean = np.diagonal(hessian).mean()
    return hessian / mean + damping * np.eye(len(hessian))


@given(
    name=st.sampled_from(["int4", "int2", "uint4", "nf4", "fp6-e2m3", "fp8-e5m2", "ternary"]),
    seed=st.integers(0, 1000),
    rows=st.sampled_from([1, 5, 16, 40, 130, 300]),
    kind=st.sampled_from([np.float32, np.float16]),
)
@settings(max_examples=40)
def test_no_sweep_makes_the_error_more(name: str, seed: int, rows: int, kind: Any) -> None:
    X, W = correlated_inputs(rows, rows + 9, seed), weights(rows, 6, seed)
    H, quantization = X.T @ X, round_to_nearest(W, FORMATS[name], 16, "extreme", scale_type=kind)
    losses = [loss(W, quantization, damped_hessian(H))]
    for sweeps in (1, 2, 4):
        better = polish(quantization, W, H, 0.01, sweeps)
        assert better.scales.dtype == kind
        losses.append(loss(W, better, damped_hessian(H)))
    # sums of up to 300 x 300 products in another order
    assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(losses))


def test_in_the_end_no_single_code_can_be_better() -> None:
    X, W, table = correlated_inputs(40, 90, 2), weights(40, 3, 2), FORMATS["int3"]
    H, quantization = X.T @ X, round_to_nearest(W, FORMATS["int3"], 16, "extreme")
    polished_matrix = polish(quantization, W, H, 0.01, 60)
    best = loss(W, polished_matrix, damped_hessian(H))
    assert best < 0.7 * loss(W, quantization, damped_hessian(H))
    for row in range(40):
        for code in range(8):
            codes = polished_matrix.codes.copy()
            codes[row, 1] = code
            assert loss(
                W, QuantizedMatrix(table, 16, codes, polished_matrix.scales, None), damped_hessian(H)
            ) >= best * (1 - 1e-9)


@pytest.mark.parametrize("order", ["natural", "activation"])
def test_it_makes_what_gptq_leaves_less(order: Any) -> None:
    X, W = correlated_inputs(128, 300, 4), weights(128, 16, 4)
    H = X.T @ X
    losses = []
    for sweeps in (0, 2):
        method = GPTQ(order=order, sweeps=sweeps)
        quantization = method.round(W, FORMATS["uint3"], 32, "least_squares", scale_type=np.float32, statistics=H)
        losses.append(loss(W, quantization, H))
    assert losses[1] < 0.99 * losses[0]


@pytest.mark.parametrize("factor", [0.0, 1e-40, 1e30])
def test_weights_and_inputs_of_zero_denormal_and_huge(factor: float) -> None:
    W = (weights(40, 4, 7).astype(np.float64) * factor).astype(np.float32)
    for H in (np.zeros((40, 40)), np.eye(40) * 1e-300, np.eye(40) * 1e300):
        quantization = polish(round_to_nearest(W, FORMATS["int4"], 16, "extreme"), W, H, 0.01, 2)
        assert np.abs(quantization.dequantize() - W).max() <= np.abs(W).max()
