"""Every rounding method takes a format whose codes look at their neighbours in a row, and loses less with it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from graphopt.quantization.rounding import QuantizedMatrix
from graphopt.quantization.rounding.methods import METHODS
from graphopt.quantization.rounding.native import rounds
from tests.formats import PAIRS, SINGLES
from tests.quantization.rounding.problems import correlated_inputs, loss

RANDOM = np.random.default_rng(0)
X, W = correlated_inputs(64, 200, 0), RANDOM.standard_normal((64, 96)).astype(np.float32)
H = X.T @ X


def round_matrix(method: str, format: object, scale: str = "least_squares", **options: object) -> QuantizedMatrix:
    rounding = METHODS[method](**options)
    statistics = None if rounding.needs is None else H
    return rounding.round(W, format, 32, scale, scale_type=np.float32, statistics=statistics)


def test_a_row_is_encoded_at_the_least_error_of_all_its_codes() -> None:
    numbers, scales = RANDOM.standard_normal(5), RANDOM.uniform(0.5, 1.5, 5)
    importance = RANDOM.uniform(0.1, 3, 5)
    rows = np.array(list(itertools.product(range(4), repeat=5)), np.uint8)
    errors = (importance * (PAIRS.decode(rows, scales) - numbers) ** 2).sum(1)
    codes = PAIRS.encode(numbers, scales, importance=importance)
    assert (importance * (PAIRS.decode(codes, scales) - numbers) ** 2).sum() == pytest.approx(errors.min(), rel=1e-12)


@pytest.mark.parametrize("scale", ["extreme", "least_squares"])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_neighbours_make_the_error_less(method: str, scale: str) -> None:
    assert not rounds(PAIRS)  # the library rounds each weight by itself
    pairs, singles = round_matrix(method, PAIRS, scale), round_matrix(method, SINGLES, scale)
    assert pairs.codes.shape == singles.codes.shape == W.shape
    assert pairs.scales.shape == singles.scales.shape == (2, 96)
    # At one scale, pairs lose 0.80 of what 4 values do. Scales of a whole row are searched together, those of 4 values
    # column by column, which takes back up to two thirds of the gain; at the extreme 4 values lose twice as much.
    assert loss(W, pairs, H) < (0.6 if scale == "extreme" else 0.94) * loss(W, singles, H)


def test_error_feedback_makes_up_for_errors_of_whole_rows() -> None:
    for options in ({}, {"order": "natural", "scales": "reached"}, {"order": "natural"}):
        assert loss(W, round_matrix("gptq", PAIRS, **options), H) < 0.8 * loss(W, round_matrix("nearest", PAIRS), H)


def test_descent_makes_no_error_more() -> None:
    losses = [loss(W, round_matrix("gptq", PAIRS, sweeps=sweeps, damping=1e-6), H) for sweeps in (0, 1, 3)]
    # Rows are encoded at their least error while all others stay, and no scale changes that does not help.
    assert losses[0] >= losses[1] * (1 - 1e-9)
    assert losses[1] >= losses[2] * (1 - 1e-9)
