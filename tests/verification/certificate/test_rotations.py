from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.numerics.rotations.claims import RotationClaim
from graphopt.numerics.rotations.hadamard import hadamard
from graphopt.verification.certificate.rotations import Rotations, check_hadamard, of_claim, of_matrices, sylvester
from tests.verification.certificate.rotated_models import dense

# Sums of at most 512 numbers of order 1 in float64.
TOLERANCE = 1e-12

claims = st.builds(
    lambda factors, blocks, seed: RotationClaim(
        kind="hadamard", width=blocks * int(np.prod(factors)), factors=factors, seed=seed
    ),
    st.lists(st.sampled_from([1, 2, 4, 8, 12, 20]), min_size=1, max_size=2).map(tuple),
    st.integers(1, 3),
    st.none() | st.integers(0, 99),
)


@given(
    claim=claims | st.builds(RotationClaim, kind=st.just("random"), width=st.integers(1, 40), seed=st.integers(0, 9))
)
def test_products_are_those_with_the_matrix_that_the_claim_describes(claim: RotationClaim) -> None:
    rotation, Q = of_claim(claim), dense(claim)
    # without signs, blocks are copies of one smaller matrix
    Q = Q[: rotation.width, : rotation.width]
    rows = np.random.default_rng(0).standard_normal((2, 3, rotation.width))
    np.testing.assert_allclose(rotation.apply(rows), rows @ Q, atol=TOLERANCE)
    np.testing.assert_allclose(rotation.apply(rows, inverse=True), rows @ Q.T, atol=TOLERANCE)
    np.testing.assert_allclose(rotation.apply(rotation.apply(rows), inverse=True), rows, atol=TOLERANCE)


@pytest.mark.parametrize("order", [1, 2, 32, 64, 128, 512, 2048])
def test_large_sylvester_matrices_are_products_of_small_ones(order: int) -> None:
    parts = sylvester(order)
    assert max(len(part) for part in parts) <= 64
    assert np.array_equal(reduce(np.kron, parts), hadamard(order))
    assert sylvester(order + (order > 1)) == () or order == 1


@given(order=st.sampled_from([2, 4, 12, 16, 20, 28, 128]), data=st.data())
def test_one_wrong_entry_is_no_hadamard_matrix(order: int, data: st.DataObject) -> None:
    matrix = hadamard(order).copy()
    assert reduce(np.kron, check_hadamard(matrix)).tolist() == matrix.tolist()
    index = data.draw(st.tuples(st.integers(0, order - 1), st.integers(0, order - 1)))
    for wrong in (-matrix[index], 0, 3):
        wrong_matrix = matrix.copy()
        wrong_matrix[index] = wrong
        with pytest.raises(ValueError, match=r"H H\^T is not|neither"):
            check_hadamard(wrong_matrix)


def test_other_integer_matrices_with_orthogonal_rows_are_no_hadamard_matrices() -> None:
    with pytest.raises(ValueError, match="neither"):
        check_hadamard(2 * np.eye(4, dtype=np.int8))
    with pytest.raises(ValueError, match="square"):
        check_hadamard(hadamard(4)[:2])


def test_equal_matrices_have_one_number() -> None:
    rotations = Rotations()
    number = rotations.number(of_claim(RotationClaim(kind="hadamard", width=96, factors=(12, 8))))
    assert rotations.number(of_matrices([hadamard(12), hadamard(8)])) == number
    assert rotations.number(of_matrices([np.kron(hadamard(12), hadamard(2)), hadamard(4)])) == number
    assert rotations.number(of_matrices([-hadamard(12), -hadamard(8)])) == number
    assert rotations.number(of_matrices([hadamard(8), hadamard(12)])) != number
    assert rotations.number(of_matrices([-hadamard(12), hadamard(8)])) != number
    assert len(rotations) == 3


def test_copies_without_signs_are_one_small_matrix() -> None:
    assert of_claim(RotationClaim(kind="hadamard", width=24, factors=(4,))).width == 4
    assert of_claim(RotationClaim(kind="hadamard", width=24, factors=(4,), seed=0)).width == 24


@pytest.mark.parametrize(
    "claim",
    [
        RotationClaim(kind="hadamard", width=8),
        RotationClaim(kind="hadamard", width=8, factors=(0,)),
        RotationClaim(kind="hadamard", width=8, factors=(-2, -4)),
        RotationClaim(kind="hadamard", width=8, factors=(3,)),
        RotationClaim(kind="hadamard", width=0, factors=(1,)),
        RotationClaim(kind="hadamard", width=6, factors=(6,)),
        RotationClaim(kind="random", width=8),
        RotationClaim(kind="random", width=8, factors=(8,), seed=1),
    ],
)
def test_a_claim_of_no_matrix_is_refused(claim: RotationClaim) -> None:
    with pytest.raises(ValueError, match="."):
        of_claim(claim)


def test_a_random_matrix_that_is_not_orthogonal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class SkewedRotation:
        def __init__(self, width: int, seed: int) -> None:
            self.matrix = np.eye(width)
            self.matrix[0, 1] = 1e-9

    monkeypatch.setattr("graphopt.verification.certificate.rotations.RandomRotation", SkewedRotation)
    with pytest.raises(ValueError, match="not orthogonal"):
        of_claim(RotationClaim(kind="random", width=8, seed=0))
