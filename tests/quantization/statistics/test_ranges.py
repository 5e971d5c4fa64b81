"""Ranges of tensors: what codes of 8 bits reach."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from graphopt.quantization.statistics.ranges import Observer, loss, step_and_zero

NUMBERS = st.floats(-1e6, 1e6, width=32)


@given(NUMBERS, NUMBERS)
def test_zero_is_a_code_and_both_ends_are_reached(first: float, second: float) -> None:
    low, high = min(first, second, 0.0), max(first, second, 0.0)
    assume(high - low > 1e-30)
    step, zero = step_and_zero(low, high)
    assert 0 <= zero <= 255  # codes have 8 bits
    # A code of 0 shifts both ends by half a step at most; float32 rounds the step.
    assert -zero * float(step) == pytest.approx(low, abs=0.51 * float(step))
    assert (255 - zero) * float(step) == pytest.approx(high, abs=0.51 * float(step) + 1e-6 * high)


def observer(numbers: np.ndarray) -> Observer:
    result = Observer()
    for part in np.array_split(numbers, 4):
        result.add(part)
    return result


def test_methods_differ_where_one_number_is_far_out() -> None:
    numbers = np.random.default_rng(0).standard_normal(4000)
    numbers[17] = 60
    range_observer = observer(numbers)
    assert range_observer.range("minmax", 99) == pytest.approx((numbers.min(), 60), rel=1e-6)
    low, high = range_observer.range("percentile", 99.9)
    # of normal numbers one of a thousand is beyond 3.1 to 3.3 on either side
    assert -4 < low < -2
    assert 2 < high < 4


def test_few_levels_lose_less_where_the_largest_numbers_are_cut_off() -> None:
    numbers = np.random.default_rng(0).standard_normal(4000)
    range_observer = observer(numbers)
    best, whole = (loss(numbers, *range_observer.range(method, 99, 15), 15) for method in ("mse", "minmax"))
    # A step is a fifteenth of the range, so its square is a good deal smaller where the range is.
    assert best < 0.8 * whole


def test_what_is_not_finite_is_refused_and_nothing_has_a_range() -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        Observer().add(np.array([1, np.nan]))
    empty = Observer()
    empty.add(np.zeros(0))
    assert empty.range("mse", 99) == (0, 0)
    assert step_and_zero(0, 0)[0] > 0
