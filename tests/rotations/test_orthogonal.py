from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.rotations import HadamardRotation, RandomRotation, has_hadamard, rotation_for
from graphopt.rotations.hadamard import hadamard

# float64 through a fast transform of up to 1024 terms: log2(1024) additions of eps 2.2e-16, with room.
EXACT = 1e-12


@given(width=st.integers(1, 160).map(lambda n: 4 * n).filter(has_hadamard), seed=st.integers(0, 2**32))
@settings(max_examples=40)
def test_hadamard_rotation_is_the_matrix_it_says(width: int, seed: int) -> None:
    rotation = HadamardRotation(width, seed)
    matrix = rotation.apply(np.eye(width), -1)
    assert np.abs(matrix @ matrix.T - np.eye(width)).max() < EXACT
    # every entry has the same magnitude: that is what spreads an outlier evenly
    assert np.abs(np.abs(matrix) - width**-0.5).max() < EXACT


def test_fast_transform_is_sylvesters_matrix() -> None:
    rotation = HadamardRotation(64, 3)
    dense = np.diag(rotation.signs) @ hadamard(64) / 8
    assert np.abs(rotation.apply(np.eye(64), -1) - dense).max() < EXACT


@pytest.mark.parametrize("rotation", [HadamardRotation(24, 1), HadamardRotation(640, 1), RandomRotation(10, 1)])
def test_a_writer_and_a_reader_cancel(rotation: HadamardRotation | RandomRotation) -> None:
    random = np.random.default_rng(0)
    x, w = random.standard_normal((5, rotation.width)), random.standard_normal((rotation.width, 7))
    assert np.abs(rotation.apply(x, -1) @ rotation.apply(w, 0) - x @ w).max() < EXACT * rotation.width


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_any_axis(axis: int) -> None:
    array = np.random.default_rng(0).standard_normal((12, 12, 12))
    rotation = HadamardRotation(12, 5)
    matrix = rotation.apply(np.eye(12), -1)
    expected = np.moveaxis(np.tensordot(array, matrix, axes=(axis, 0)), -1, axis)
    assert np.abs(rotation.apply(array, axis) - expected).max() < EXACT


def test_seeds_differ_and_repeat() -> None:
    x = np.random.default_rng(0).standard_normal(16)
    assert np.array_equal(HadamardRotation(16, 1).apply(x, 0), HadamardRotation(16, 1).apply(x, 0))
    assert not np.array_equal(HadamardRotation(16, 1).apply(x, 0), HadamardRotation(16, 2).apply(x, 0))


def test_without_a_hadamard_matrix_a_random_rotation_says_so() -> None:
    assert rotation_for(92, "hadamard", 0).kind == "random orthogonal 92"
    assert rotation_for(640, "hadamard", 0).kind == "Hadamard 640 = 20 x 32"
    assert rotation_for(640, "random", 0).kind == "random orthogonal 640"
