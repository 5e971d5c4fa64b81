from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.numerics.rotations.claims import RotationClaim
from graphopt.verification.certificate import weights
from graphopt.verification.certificate.coordinates import Tag, in_blocks
from graphopt.verification.certificate.rotations import Rotations, of_claim
from graphopt.verification.certificate.weights import apply_to_array, compare_entries, compare_matrix, is_same
from tests.verification.certificate.rotated_models import dense

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
IN, OUT = (
    RotationClaim(kind="hadamard", width=24, factors=(12, 2), seed=1),
    RotationClaim(kind="random", width=8, seed=2),
)
ROTATIONS = Rotations()
NUMBERS = [ROTATIONS.number(of_claim(claim)) for claim in (IN, OUT)]
ROWS, COLUMNS = in_blocks(NUMBERS[0], 24, 48), in_blocks(NUMBERS[1], 8, 16)
M_IN, M_OUT = np.kron(np.eye(2), dense(IN)), np.kron(np.eye(2), dense(OUT))


def vectors(count: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((16, count))


def fuse(dtype: type, seed: int = 0, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Return W [48, 16] and M_in^T W M_out, each stored in ``dtype``."""
    W = (scale * np.random.default_rng(seed).standard_normal((48, 16))).astype(dtype)
    return W, (M_IN.T @ W.astype(np.float64) @ M_OUT).astype(dtype)


@given(dtype=st.sampled_from(DTYPES), seed=st.integers(0, 10**6), scale=st.sampled_from([1.0, 1e-4, 1e4 / 16]))
def test_one_rounding_is_always_within_the_bound(dtype: type, seed: int, scale: float) -> None:
    # float16 at 1e-4 reaches its smallest numbers, which are not rounded relatively
    W, rotated_weight = fuse(dtype, seed, scale)
    maps = (ROWS, COLUMNS)
    comparison = compare_matrix(ir.tensor(W), ir.tensor(rotated_weight), maps, ROTATIONS, vectors(seed=seed))
    # a ratio is of what rounding explains
    assert 0 < comparison.ratio <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("maps", [(ROWS, None), (None, COLUMNS), (ROWS, COLUMNS)])
def test_other_maps_are_far_out_of_the_bound(dtype: type, maps: tuple[Tag, Tag]) -> None:
    W, _ = fuse(dtype)
    left, right = (M_IN if maps[0] else np.eye(48)), (M_OUT if maps[1] else np.eye(16))

    def ratio(matrix: np.ndarray) -> float:
        return compare_matrix(ir.tensor(W), ir.tensor(matrix.astype(dtype)), maps, ROTATIONS, vectors()).ratio

    exact = W.astype(np.float64)
    assert ratio(left.T @ exact @ right) <= 1
    for wrong in (exact, left @ exact @ right.T, -left.T @ exact @ right, (left.T @ exact @ right)[::-1]):
        assert ratio(wrong) > 10


def test_the_stated_probability_of_missing_a_row_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is off by as much as one vector misses at most every third time."""
    # float64 taken for a type of coarse rounding: nothing else is off then, and the fault is not rounded away
    monkeypatch.setitem(weights._ROUNDING, ir.DataType.DOUBLE, (2.0**-11, 0.0))
    W, rotated_weight = fuse(np.float64)
    maps, tries = (ROWS, COLUMNS), 2000
    # `visible` belongs to a probability of 1e-6, and probability times length is constant
    visible = compare_matrix(ir.tensor(W), ir.tensor(rotated_weight), maps, ROTATIONS, vectors(1)).visible
    direction = np.random.default_rng(5).standard_normal(16)
    length = 3 * 1e-6 * visible * np.linalg.norm(rotated_weight[7])
    rotated_weight[7] += length * direction / np.linalg.norm(direction)
    misses = sum(
        compare_matrix(ir.tensor(W), ir.tensor(rotated_weight), maps, ROTATIONS, vectors(1, seed)).ratio <= 1
        for seed in range(tries)
    )
    # four standard deviations of a share of a third in so many tries; a bound that is not vacuous lets some pass
    assert 0.05 < misses / tries <= 1 / 3 + 4 * np.sqrt(2 / 9 / tries)


def test_the_row_that_is_off_is_named() -> None:
    W, rotated_weight = fuse(np.float32)
    rotated_weight[31] *= np.float32(1.01)
    comparison = compare_matrix(ir.tensor(W), ir.tensor(rotated_weight), (ROWS, COLUMNS), ROTATIONS, vectors())
    assert comparison.ratio > 1
    assert comparison.row == 31


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_never_explained(bad: float) -> None:
    W, rotated_weight = fuse(np.float32)
    rotated_weight[3, 4] = bad
    comparison = compare_matrix(ir.tensor(W), ir.tensor(rotated_weight), (ROWS, COLUMNS), ROTATIONS, vectors())
    assert comparison.ratio == np.inf
    b, rotated_bias = fused_vector()
    rotated_bias[2] = bad
    assert compare_entries(ir.tensor(b), ir.tensor(rotated_bias), ROWS, ROTATIONS).ratio == np.inf


def fused_vector() -> tuple[np.ndarray, np.ndarray]:
    b = np.random.default_rng(1).standard_normal(48).astype(np.float32)
    return b, (b.astype(np.float64) @ M_IN).astype(np.float32)


def test_vectors_are_compared_entry_by_entry() -> None:
    b, rotated_bias = fused_vector()
    # a ratio is of what rounding explains
    assert 0 < compare_entries(ir.tensor(b), ir.tensor(rotated_bias), ROWS, ROTATIONS).ratio <= 1
    rotated_bias[17] = np.nextafter(np.nextafter(rotated_bias[17], np.float32(9)), np.float32(9))
    comparison = compare_entries(ir.tensor(b), ir.tensor(rotated_bias), ROWS, ROTATIONS)
    assert comparison.ratio > 1
    assert comparison.row == 17


def test_blocks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    W, rotated_weight = fuse(np.float32)
    whole = compare_matrix(ir.tensor(W), ir.tensor(rotated_weight), (ROWS, COLUMNS), ROTATIONS, vectors())
    monkeypatch.setattr(weights, "_BLOCK", 100)
    cut = compare_matrix(ir.tensor(W), ir.tensor(rotated_weight), (ROWS, COLUMNS), ROTATIONS, vectors())
    assert cut.row == whole.row
    assert cut.ratio == pytest.approx(whole.ratio, rel=1e-6)
    assert is_same(ir.tensor(W), ir.tensor(W.copy()))
    for row in (0, 7, 47):
        edit = W.copy()
        edit[row, 3] = np.nextafter(edit[row, 3], np.float32(9))
        assert not is_same(ir.tensor(W), ir.tensor(edit))


@pytest.mark.parametrize(
    ("left_array", "right_array", "are_same"),
    [
        (np.array(1.0), np.array(1.0), True),
        (np.array([np.nan, -np.inf]), np.array([np.nan, -np.inf]), True),
        (np.array(0.0), np.array(-0.0), False),
        (np.array([1, 2]), np.array([1, 2], np.int32), False),
        (np.array([[1, 2]]), np.array([1, 2]), False),
        (np.zeros((0, 3)), np.zeros((0, 3)), True),
    ],
)
def test_same_means_every_bit(left_array: np.ndarray, right_array: np.ndarray, are_same: bool) -> None:
    assert is_same(ir.tensor(left_array), ir.tensor(right_array)) == are_same


def test_a_file_is_closed_again_unless_it_was_open(tmp_path: Path) -> None:
    np.arange(6, dtype=np.float32).tofile(tmp_path / "w")
    tensor = ir.ExternalTensor("w", 0, 24, ir.DataType.FLOAT, shape=ir.Shape([2, 3]), name="w", base_dir=tmp_path)
    assert apply_to_array(tensor, np.sum) == 15
    assert tensor.raw is None
    tensor.numpy()
    assert apply_to_array(tensor, np.sum) == 15
    assert tensor.raw is not None
