from __future__ import annotations

import numpy as np
import pytest

from graphopt.quality.spread import Moments


def test_moments_of_pieces_are_those_of_the_whole() -> None:
    numbers = np.random.default_rng(0).standard_normal((100, 1000)).astype(np.float32)
    moments = Moments()
    for piece in np.array_split(numbers, 7):
        moments.add(piece)
    spread = moments.spread()
    assert spread is not None
    wide = numbers.astype(np.float64)
    assert spread.kurtosis == pytest.approx((wide**4).mean() / (wide**2).mean() ** 2, rel=1e-9)
    assert spread.kurtosis == pytest.approx(3, abs=0.05)  # standard error sqrt(24 / 100,000) = 0.016
    assert spread.largest == pytest.approx(np.abs(wide).max() / np.sqrt((wide**2).mean()))


def test_one_outlier_is_seen_and_a_rotation_takes_it_away() -> None:
    numbers = np.zeros((1, 64))
    numbers[0, 5] = 7.0
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((64, 64)))[0]
    before, after = Moments(), Moments()
    before.add(numbers)
    after.add(numbers @ rotation)
    spreads = before.spread(), after.spread()
    assert spreads[0] is not None
    assert spreads[1] is not None
    assert spreads[0].kurtosis == pytest.approx(64)
    assert spreads[1].kurtosis < 6  # 3 for normal numbers, with a standard error of sqrt(24 / 64) = 0.6


@pytest.mark.parametrize("numbers", [np.empty(0), np.zeros(3), np.array([1.0, np.nan]), np.array([np.inf])])
def test_what_has_no_spread_has_none(numbers: np.ndarray) -> None:
    moments = Moments()
    moments.add(numbers)
    assert moments.spread() is None
