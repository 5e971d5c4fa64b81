"""Tables of least error: a step of Lloyd's algorithm leaves them, and they err less than integers and quantiles."""

from __future__ import annotations

import numpy as np
import pytest

from graphopt.numerics.formats import FORMATS, integer_step
from graphopt.numerics.formats.table import Doubles, TableFormat

NUMBERS = np.random.default_rng(0).standard_normal((2000, 64))
SHARES = np.linspace(1.15, 0.7, 16)


def best(table: TableFormat) -> tuple[Doubles, Doubles]:
    """Return the scale of each group that errs least, and its squared error."""
    errors, scales = np.full(len(NUMBERS), np.inf), np.zeros(len(NUMBERS))
    for share in SHARES:
        trial_scales = np.abs(NUMBERS).max(1) * share / np.abs(table.values).max()
        trial_errors = (
            (table.decode(table.encode(NUMBERS / trial_scales[:, None])) * trial_scales[:, None] - NUMBERS) ** 2
        ).sum(1)
        scales, errors = np.where(trial_errors < errors, trial_scales, scales), np.minimum(trial_errors, errors)
    return scales, errors


@pytest.mark.parametrize("bits", [3, 4, 5])
def test_each_value_is_the_mean_of_what_it_stands_for(bits: int) -> None:
    table = FORMATS[f"nl{bits}"]
    scales, _ = best(table)
    units = NUMBERS / scales[:, None]
    codes, weights = table.encode(units), np.broadcast_to(scales[:, None] ** 2, units.shape)
    sums = np.bincount(codes.ravel(), (weights * units).ravel(), len(table.values))
    means = sums / np.bincount(codes.ravel(), weights.ravel(), len(table.values))
    distances = np.abs(means - table.values) * 64
    # The iteration was cut off, and 128000 numbers are a sample: seen are up to 1 step for values that are common.
    # The 0 was held in place, and the ends are met by the largest of each group alone.
    assert distances[1:-1].max() < 1.5
    # in steps of 1/64, to which values are rounded: half of them stay within a half
    assert np.median(distances) < 0.5


@pytest.mark.parametrize(("bits", "bound"), [(3, 0.9), (4, 0.8), (5, 0.8)])
def test_it_errs_less_than_integers_of_as_many_bits(bits: int, bound: float) -> None:
    ratio = best(FORMATS[f"nl{bits}"])[1].sum() / best(FORMATS[f"int{bits}"])[1].sum()
    assert ratio < bound  # seen: 0.85, 0.78, 0.76


def test_it_errs_less_than_quantiles() -> None:
    assert best(FORMATS["nl4"])[1].sum() < best(FORMATS["nf4"])[1].sum()


@pytest.mark.parametrize("bits", [3, 4, 5])
def test_kernels_multiply_bytes_and_zero_stays_zero(bits: int) -> None:
    table = FORMATS[f"nl{bits}"]
    assert integer_step(table.table, 127) == 1 / 64
    assert np.ptp(table.table) * 64 <= 128  # two products of bytes from the least one on fit 16 bits
    assert table.decode(table.encode(np.zeros(1))) == [0]
    assert len(set(table.values)) == 2**bits
