from __future__ import annotations

from fractions import Fraction
from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.numerics.formats import FORMATS, integer_step

# From the definitions: the spacing of subnormal numbers, and how many of it the largest number is.
STEPS = {
    "int4": (1.0, 8), "int8": (1.0, 128), "uint8": (1.0, 255), "ternary": (1.0, 1),
    "fp4": (0.5, 12), "fp5-e2m2": (0.25, 28), "fp5-e3m1": (0.125, 192),
    "fp6-e2m3": (0.125, 60), "fp6-e3m2": (0.0625, 448),
    "fp8-e4m3": (2.0**-9, 448 * 2**9), "fp8-e5m2": (2.0**-16, 57344 * 2**16),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_formats(name: str) -> None:
    step, largest = STEPS[name]
    assert integer_step(FORMATS[name].table, largest) == step
    assert integer_step(FORMATS[name].table, largest - 1) is None


@pytest.mark.parametrize("name", ["nf4", "sf4"])
def test_quantiles_are_no_integers(name: str) -> None:
    assert integer_step(FORMATS[name].table, 2**15 - 1) is None


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1), st.integers(1, 40000))
def test_it_divides_all_and_nothing_larger_does(values: list[float], limit: int) -> None:
    step = integer_step(values, limit)
    largest = max(map(abs, values))
    if step is None:
        # a step with multiples of at most the limit would be one of these fractions of the largest value
        fractions = range(1, min(limit, 32) + 1)
        assert all(any((Fraction(v) * n / Fraction(largest)).denominator > 1 for v in values) for n in fractions)
    elif largest:
        multiples = [int(Fraction(value) / Fraction(step)) for value in values]
        assert all(Fraction(value) == Fraction(step) * m for value, m in zip(values, multiples, strict=True))
        assert gcd(*multiples) == 1
        assert max(map(abs, multiples)) <= limit


def test_it_is_exact() -> None:
    tenth = float(np.float32(0.1))
    assert integer_step([tenth, 2 * tenth, -4 * tenth], 4) == tenth
    assert integer_step([0.1, 0.3], 2**15) is None
    assert integer_step([0.0, -0.0], 1) == 1
    assert integer_step([3.0, -6.0], 2) == 3
    with pytest.raises(ValueError, match="not all finite"):
        integer_step([1.0, np.inf], 2)
