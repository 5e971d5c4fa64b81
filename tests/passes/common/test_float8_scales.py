"""Scales that are floats of 8 bits under a step: found by their numbers, to the last bit, and no others."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.graph.weights import Inline
from graphopt.passes.common.float8_scales import float8_scales
from graphopt.passes.common.leveled_scales import LeveledScales


def float8(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return numbers of E4M3 over its whole range, zeros among them, in float64."""
    codes = np.random.default_rng(seed).integers(0, 127, shape, dtype=np.uint8)
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


@given(
    st.integers(0, 2**32 - 1),
    st.floats(2.0**-20, 2.0**10, width=32),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(2, 40, 16), (3, 2, 9, 16)]),
)
def test_scales_of_checkpoints_come_back(
    seed: int, factor: float, divides: bool, of_columns: bool, shape: tuple[int, ...]
) -> None:
    steps = np.full((1,) * len(shape), 1 / factor if divides else factor)
    if of_columns:
        steps = steps * np.exp2(np.random.default_rng(seed).uniform(-1, 1, (*shape[:-2], 1, 16)))
    scales = (float8(seed, shape) * steps).astype(np.float32)
    source = Inline.from_array(scales)
    form = float8_scales(source)
    assert form is not None
    assert form.is_shared or of_columns
    parts = form.evaluate()
    for name, (dtype, of_part) in form.parts.items():
        assert (parts[name].dtype, parts[name].shape) == (dtype.numpy(), of_part)
    levels, factors = (Inline.from_array(parts[name]) for name in ("levels", "steps"))
    whole = LeveledScales(levels, factors, source.dtype)
    assert np.array_equal(whole.numpy(), scales)
    region = (slice(1, 2),) * (len(shape) - 2) + (slice(2, 5), slice(3, 16))
    assert np.array_equal(whole.evaluate(region), scales[region])


def test_those_of_float16_come_back() -> None:
    scales = (float8(3, (2, 40, 16)) * 2.0**-7).astype(np.float16)
    form = float8_scales(Inline.from_array(scales))
    assert form is not None
    levels, steps = (Inline.from_array(form.evaluate()[name]) for name in ("levels", "steps"))
    assert np.array_equal(LeveledScales(levels, steps, form.source.dtype).numpy(), scales)


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_other_scales_stay(kind: type) -> None:
    """One number between two of E4M3, and one that is not finite, are enough.

    0.97 of the largest is such a number: the next smaller one of E4M3 is at most 15/16 of it.
    """
    scales = (float8(5, (2, 40, 16)) * 0.01).astype(kind)
    scales[1, 7, 3] = scales[1].max() * 0.97
    assert float8_scales(Inline.from_array(scales)) is None
    scales[1, 7, 3] = np.inf
    assert float8_scales(Inline.from_array(scales)) is None
    assert float8_scales(Inline.from_array(np.random.default_rng(0).random((2, 40, 16)).astype(kind))) is None
