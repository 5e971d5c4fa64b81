"""Products of numbers as integers of 11 bits."""

from __future__ import annotations

import numpy as np
import pytest

from graphopt.quantization.statistics import integers
from graphopt.quantization.statistics.integers import add_products, integers_of, products_of
from graphopt.runtime_ops.library import library_path

SHAPES = [(1, 1), (5, 3), (48, 64), (77, 130), (2300, 70)]


def numbers(shape: tuple[int, int], seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[1]))).astype(np.float32)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_integers_are_off_by_half_a_step(shape: tuple[int, int], axis: int) -> None:
    x = numbers(shape, 0)
    vectors = x if axis else x.T
    whole = integers_of(x, axis)
    assert whole.numbers.ctypes.data % 64 == 0
    means = whole.whole()[:, : vectors.shape[1]] * whole.scales[:, None]
    # half of a step, and float32's rounding of a quotient up to 1023
    assert (np.abs(means - vectors) <= (0.5 + 1e-4) * whole.scales[:, None]).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_library_gives_the_bits_of_numpy(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    if library_path() is None:
        pytest.skip("the library was not built, and NumPy's bits have nothing to be compared with")
    x, y = numbers(shape, 1), numbers((shape[0], 66), 2)
    results = []
    for is_native in (True, False):
        if not is_native:
            monkeypatch.setattr(integers, "library_path", lambda: None)
        left, right = integers_of(x, 0), integers_of(y, 0)
        sums, half = np.ones((shape[1], 66)), np.ones((shape[1], shape[1]))
        add_products(left, right, sums)
        add_products(left, left, half, half=True)
        products = np.empty((shape[0], 66), np.float32)
        products_of(integers_of(np.ascontiguousarray(x), 1), integers_of(numbers((shape[1], 66), 3), 0), products)
        results.append([left.numbers, left.scales, left.squares, sums, half, products])
    for left_array, right_array in zip(*results, strict=True):
        assert np.array_equal(left_array, right_array)


@pytest.mark.parametrize("axis", [0, 1])
def test_the_library_gives_the_bits_of_numpy_for_odd_numbers(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if library_path() is None:
        pytest.skip("the library was not built, and NumPy's bits have nothing to be compared with")
    x = numbers((133, 131), 5)  # two whole panels, and some vectors and numbers behind them
    x[3, 7], x[129, 130], x[64, 64] = np.nan, -np.inf, 3e38
    x[:, 9], x[70], x[:, 100], x[:, 128] = 0, -0.0, 1e-40, 1e-30
    native = integers_of(x, axis)
    monkeypatch.setattr(integers, "library_path", lambda: None)
    reference = integers_of(x, axis)
    assert np.array_equal(native.numbers, reference.numbers)
    assert np.array_equal(native.scales, reference.scales, equal_nan=True)
    assert np.array_equal(native.squares, reference.squares)
    assert np.isnan(native.scales).sum() == 2
    assert native.numbers.any()


def test_what_is_not_finite_stays_so_and_zeros_stay_zeros() -> None:
    x = numbers((6, 4), 4)
    x[2, 0], x[1, 1], x[:, 2] = np.nan, np.inf, 0
    vectors = integers_of(x, 0)
    sums = np.zeros((4, 4))
    add_products(vectors, vectors, sums)
    assert np.isnan(sums[:2]).all()
    assert (sums[2, 2:] == 0).all()
    assert np.isclose(sums[3, 3], np.square(x[:, 3], dtype=np.float64).sum(), rtol=1e-3)
