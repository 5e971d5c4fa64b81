from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.numerics.rotations import HadamardRotation, RandomRotation, hadamard, has_hadamard, rotation_for, signs

# float64 sums of up to 1024 terms of size 1: log2(1024) eps 2.2e-16, with room.
EXACT = 1e-12


def dense(rotation: HadamardRotation) -> np.ndarray:
    """Q from its definition, [width, width]."""
    matrix = np.eye(rotation.blocks)
    for order in rotation.factors:
        matrix = np.kron(matrix, hadamard(order))
    diagonal = np.ones(rotation.width) if rotation.seed is None else signs(rotation.width, rotation.seed)
    return diagonal[:, None] * matrix / np.sqrt(prod(rotation.factors))


@given(width=st.integers(1, 700), seed=st.none() | st.integers(0, 2**64))
@settings(max_examples=60, deadline=None)
def test_hadamard_rotation_is_the_matrix_it_says(width: int, seed: int | None) -> None:
    rotation = HadamardRotation(width, seed)
    matrix = rotation.apply(np.eye(width), -1)
    assert np.abs(matrix - dense(rotation)).max() < EXACT
    assert np.abs(matrix @ matrix.T - np.eye(width)).max() < EXACT


# a matrix of some thousand rows is made for many of these widths
@settings(max_examples=40)
@given(st.integers(1, 30_000))
def test_the_pair_is_the_product_of_the_factors(width: int) -> None:
    rotation = HadamardRotation(width, None)
    left, right = rotation.pair
    assert left.dtype == right.dtype == np.int8
    assert len(left) * len(right) * rotation.blocks == width
    if width < 700:
        assert np.array_equal(np.kron(np.eye(rotation.blocks), np.kron(left, right)), np.sign(dense(rotation)))


@pytest.mark.parametrize(
    ("width", "shapes"),
    [(1, (1, 1)), (10, (1, 2)), (12, (1, 12)), (64, (8, 8)), (128, (8, 16)), (96, (12, 8)), (5632, (88, 64))],
)
def test_the_pair_is_about_as_wide_as_high(width: int, shapes: tuple[int, int]) -> None:
    assert tuple(len(matrix) for matrix in HadamardRotation(width, None).pair) == shapes


@pytest.mark.parametrize("rotation", [HadamardRotation(24, 1), HadamardRotation(640, 1), RandomRotation(10, 1)])
def test_a_writer_and_a_reader_cancel(rotation: HadamardRotation | RandomRotation) -> None:
    random = np.random.default_rng(0)
    x, w = random.standard_normal((5, rotation.width)), random.standard_normal((rotation.width, 7))
    assert np.abs(rotation.apply(x, -1) @ rotation.apply(w, 0) - x @ w).max() < EXACT * rotation.width


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("rotation", [HadamardRotation(12, 5), HadamardRotation(12, None), RandomRotation(12, 5)])
def test_any_axis(axis: int, rotation: HadamardRotation | RandomRotation) -> None:
    array = np.random.default_rng(0).standard_normal((12, 12, 12))
    copy = array.copy()
    matrix = rotation.apply(np.eye(12), -1)
    expected = np.moveaxis(np.tensordot(array, matrix, axes=(axis, 0)), -1, axis)
    assert np.abs(rotation.apply(array, axis) - expected).max() < EXACT
    assert np.array_equal(array, copy)


@pytest.mark.parametrize("width", [12, 64, 344, 1, 10, 2880, 5376])
def test_pieces_are_the_whole_to_the_bit(width: int) -> None:
    x = np.random.default_rng(0).standard_normal((300, width))
    rotation = HadamardRotation(width, 3)
    whole = rotation.apply(x, -1)
    for cut in (1, 7, 128):
        pieces = [rotation.apply(x[:cut], -1), rotation.apply(x[cut:], -1)]
        assert np.array_equal(np.concatenate(pieces), whole)
    assert np.array_equal(rotation.apply(np.asfortranarray(x.T), 0).T, whole)
    assert np.array_equal(rotation.apply(x.T.copy(), 0).T, whole)


def test_nothing_to_rotate() -> None:
    assert HadamardRotation(12, 0).apply(np.zeros((0, 12)), -1).shape == (0, 12)
    assert HadamardRotation(12, 0).apply(np.zeros((12, 0)), 0).shape == (12, 0)


FIRST_WORDS = ["0xa30febcfd9c2825f", "0x4510bdf882d9d721"]


def test_signs_are_bits_of_a_stream_that_does_not_change() -> None:
    # PCG64(0)'s first words, written down with NumPy 2.4: a claim made then must mean the same matrix now
    assert [hex(word) for word in np.random.PCG64(0).random_raw(2)] == FIRST_WORDS
    stream = sum(int(word, 16) << 64 * index for index, word in enumerate(FIRST_WORDS))
    assert list(signs(100, 0)) == [-1.0 if stream >> bit & 1 else 1.0 for bit in range(100)]


@given(st.integers(0, 2**32), st.integers(1, 500), st.integers(1, 500))
def test_signs_of_a_shorter_width_are_the_first_ones(seed: int, width: int, extra: int) -> None:
    assert np.array_equal(signs(width + extra, seed)[:width], signs(width, seed))


def test_seeds_differ_and_repeat() -> None:
    x = np.random.default_rng(0).standard_normal(16)
    for rotation in (HadamardRotation, RandomRotation):
        assert np.array_equal(rotation(16, 1).apply(x, 0), rotation(16, 1).apply(x, 0))
        assert not np.array_equal(rotation(16, 1).apply(x, 0), rotation(16, 2).apply(x, 0))


@pytest.mark.parametrize(
    ("width", "name"),
    [
        (64, "Hadamard 64"),
        (92, "Hadamard 92"),
        (640, "Hadamard 640 = 20 x 32"),
        (25600, "Hadamard 25600 = 20 x 64 x 20"),
        (10, "Hadamard in 5 blocks of 2, since no order 10 is known"),
    ],
)
def test_names_for_a_report(width: int, name: str) -> None:
    assert rotation_for(width, "hadamard", 0).kind == name
    assert rotation_for(width, "random", 0).kind == f"random orthogonal {width}"


def test_claims_are_enough_to_build_it_again() -> None:
    claim = HadamardRotation(640, 7).claim()
    assert (claim.kind, claim.width, claim.factors, claim.seed) == ("hadamard", 640, (20, 32), 7)
    assert HadamardRotation(10, None).claim().factors == (2,)
    assert HadamardRotation(10, None).claim().seed is None
    claim = RandomRotation(640, 7).claim()
    assert (claim.kind, claim.width, claim.factors, claim.seed) == ("random", 640, (), 7)


@given(st.integers(1, 160).map(lambda n: 4 * n).filter(has_hadamard))
@settings(deadline=None)
def test_an_outlier_is_spread_evenly(width: int) -> None:
    assert np.abs(np.abs(HadamardRotation(width, 0).apply(np.eye(width)[3:4], -1)) - width**-0.5).max() < EXACT
