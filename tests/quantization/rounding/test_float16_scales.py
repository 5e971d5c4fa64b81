from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.numerics.formats import FORMATS
from graphopt.quantization.rounding import round_to_nearest
from graphopt.quantization.rounding.float16_scales import fits_half

NAMES = st.sampled_from(["int4", "uint4", "fp6-e2m3", "nf4", "fp8-e5m2"])


@given(
    name=NAMES,
    exponent=st.integers(-24, 24),
    rows=st.integers(1, 50),
    columns=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from(["extreme", "least_squares"]),
)
def test_where_it_fits_every_scale_is_normal_and_off_by_half_a_step_of_float16(
    name: str, exponent: int, rows: int, columns: int, seed: int, scale: str
) -> None:
    matrix = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) * np.float32(2.0**exponent)
    table = FORMATS[name]
    exact = round_to_nearest(matrix, table, 16, scale).scales.astype(np.float64)  # type: ignore[arg-type]
    if fits_half(matrix, table, 16):
        assert (exact >= 2**-14).all()
        assert (np.abs(exact.astype(np.float16) - exact) <= 2**-11 * exact).all()
    else:
        # a search may reach as far down as 0.6 of the extreme
        assert (exact * 0.6 < 2**-14).any() or (exact > 65504).any()


@pytest.mark.parametrize(("factor", "fits"), [(1.0, True), (1e-5, False), (1e6, False)])
def test_one_group_decides(factor: float, fits: bool) -> None:
    matrix = np.random.default_rng(0).standard_normal((64, 2000)).astype(np.float32)
    matrix[48:, 1500] *= factor
    assert fits_half(matrix, FORMATS["fp6-e2m3"], 16) is fits


def test_groups_of_zeros_do_not_count() -> None:
    matrix = np.zeros((32, 3), np.float32)
    assert fits_half(matrix, FORMATS["int4"], 16)
