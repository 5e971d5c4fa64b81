from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from graphopt.numerics.formats import FORMATS

STANDARD = {
    "fp4": ml_dtypes.float4_e2m1fn,
    "fp6-e2m3": ml_dtypes.float6_e2m3fn,
    "fp6-e3m2": ml_dtypes.float6_e3m2fn,
    "fp8-e4m3": ml_dtypes.float8_e4m3fn,
    "fp8-e5m2": ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize("name", STANDARD)
def test_values_of_the_standard(name: str) -> None:
    table = FORMATS[name]
    standard = np.arange(2**table.bits, dtype=np.uint8).view(STANDARD[name]).astype(np.float64)
    finite = np.isfinite(standard)
    assert np.array_equal(table.values[finite], standard[finite])
    assert np.array_equal(np.signbit(table.values), np.arange(2**table.bits) >= 2 ** (table.bits - 1))
    assert set(np.abs(table.values[~finite])) <= {table.values.max()}
    assert (~finite).sum() == {"fp8-e4m3": 2, "fp8-e5m2": 8}.get(name, 0)


@pytest.mark.parametrize("name", STANDARD)
def test_rounding_of_the_standard(name: str) -> None:
    table = FORMATS[name]
    # every value, every tie and a bit to either side of both
    values = np.unique(table.values).astype(np.float32)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    numbers = np.concatenate(
        [points, np.nextafter(points, np.float32(-np.inf)), np.nextafter(points, np.float32(np.inf))]
    )
    numbers = numbers[np.abs(numbers) <= values.max()]
    # from float32: ml_dtypes rounds doubles twice
    assert np.array_equal(table.decode(table.encode(numbers)), numbers.astype(STANDARD[name]).astype(np.float64))


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("fp")])
def test_neither_minus_zero_nor_what_saturates_is_written(name: str) -> None:
    table = FORMATS[name]
    codes = table.encode(np.concatenate([table.values, [-0.0, -1e-30, 1e30, -1e30, np.inf, -np.inf]]))
    half = 2 ** (table.bits - 1)
    assert half not in codes
    reserved_codes = {"fp8-e4m3": 1, "fp8-e5m2": 4}.get(name, 0)
    assert (codes % half).max() == half - 1 - reserved_codes


def test_values_of_five_bits() -> None:
    # by hand: 2^(E - 1) (1 + M / 4) with subnormal quarters, and 2^(E - 3) (1 + M / 2) with subnormal eighths
    assert FORMATS["fp5-e2m2"].table[:16] == (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7)
    assert FORMATS["fp5-e3m1"].table[:16] == (0, 0.125, 0.25, 0.375, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24)
