"""The orthogonal matrices of a certificate: what they are, that they are orthogonal, and products with them.

A Hadamard matrix is kept as Kronecker factors, each of which is checked entry by entry: +1 or -1, and H H^T = n I. Sums
of +-1 are integers far below 2^53, so this check in float64 is a check in integers. Sylvester's matrices of large order
are kept as products of small ones, H_mn = H_m (x) H_n, so a product with thousands of columns is a few small ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import isqrt, prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphopt.numerics.rotations.hadamard import hadamard
from graphopt.numerics.rotations.orthogonal import RandomRotation, signs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.numerics.rotations.claims import RotationClaim

Doubles = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.int8]

_SMALL = 64
# Two lists of factors of up to this order are compared as the matrices that they multiply to.
_LARGEST_EXPANSION = 2048


@dataclass(frozen=True, eq=False)
class Orthogonal:
    """Q = diag(signs) (I (x) F1 (x) F2 ...) / sqrt(f1 f2 ...), or Q = dense; [width, width]."""

    width: int
    factors: tuple[Bytes, ...] = ()
    signs: Doubles | None = None
    dense: Doubles | None = None

    def apply(self, rows: Doubles, *, inverse: bool = False) -> Doubles:
        """Return ``rows`` Q, or ``rows`` Q^T for the inverse; ``rows`` is [..., width]."""
        if self.dense is not None:
            return rows @ (self.dense.T if inverse else self.dense)
        if self.signs is not None and not inverse:
            rows = rows * self.signs
        orders = [len(factor) for factor in self.factors]
        parts = rows.reshape(-1, *orders)
        for axis, factor in enumerate(self.factors, start=1):
            matrix = factor.T if inverse else factor
            parts = np.moveaxis(np.moveaxis(parts, axis, -1) @ matrix.astype(np.float64), -1, axis)
        result: Doubles = parts.reshape(rows.shape) / np.sqrt(prod(orders))
        return result * self.signs if self.signs is not None and inverse else result

    def key(self) -> tuple[object, ...]:
        """Return what is equal for equal Hadamard matrices; of large or dense ones, equal ones may differ in it."""
        if self.dense is not None:
            return ("dense", id(self.dense))
        factors = self.factors
        if prod(len(factor) for factor in factors) <= _LARGEST_EXPANSION:
            factors = (reduce(np.kron, factors, np.ones((1, 1), np.int8)),)
        signs_bytes = None if self.signs is None else self.signs.tobytes()
        return (self.width, signs_bytes, *((len(factor), factor.tobytes()) for factor in factors))


class Rotations:
    """All matrices that occur, numbered from 1; equal ones get one number, and 0 stands for no rotation."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._matrices: list[Orthogonal] = []

    def __len__(self) -> int:
        return len(self._matrices)

    def __getitem__(self, number: int) -> Orthogonal:
        return self._matrices[number - 1]

    def number(self, rotation: Orthogonal) -> int:
        """Return the number of ``rotation``."""
        number = self._numbers.setdefault(rotation.key(), len(self._matrices) + 1)
        if number > len(self._matrices):
            self._matrices.append(rotation)
        return number


def of_claim(claim: RotationClaim) -> Orthogonal:
    """Build the matrix that ``claim`` describes.

    Without signs, I (x) F is many copies of F, so only one of them is returned.

    Raises:
        ValueError: there is no such matrix, or it is not orthogonal.
    """
    if claim.kind == "random":
        if claim.seed is None or claim.factors or claim.width < 1:
            raise ValueError("a random rotation needs a seed, a width and no factors")
        return _dense(np.asarray(RandomRotation(claim.width, claim.seed).matrix, np.float64))
    order = prod(claim.factors)
    if not claim.factors or min(claim.factors) < 1 or claim.width < 1 or claim.width % order:
        raise ValueError(f"factors {list(claim.factors)} do not divide a width of {claim.width}")
    factors = tuple(part for f in claim.factors for part in (sylvester(f) or check_hadamard(hadamard(f))))
    if claim.seed is None:
        return Orthogonal(order, factors)
    sign_vector = np.asarray(signs(claim.width, claim.seed), np.float64)
    if sign_vector.shape != (claim.width,) or not np.all(np.abs(sign_vector) == 1):
        raise ValueError("the signs drawn from the seed are not +1 and -1")
    return Orthogonal(claim.width, factors, sign_vector)


def of_matrices(matrices: Sequence[npt.NDArray[np.generic]]) -> Orthogonal:
    """Return (M1 (x) M2 ...) / sqrt(m1 m2 ...) for Hadamard matrices.

    Raises:
        ValueError: one of them is none.
    """
    factors = tuple(part for matrix in matrices for part in check_hadamard(matrix))
    return Orthogonal(prod(len(factor) for factor in factors), factors)


def check_hadamard(matrix: npt.NDArray[np.generic]) -> tuple[Bytes, ...]:
    """Return ``matrix`` [n, n] as int8 factors once it is seen to be a Hadamard matrix.

    Raises:
        ValueError: an entry is not +1 or -1, or H H^T is not n I.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ValueError(f"a Hadamard matrix is square, not {list(matrix.shape)}")
    exact = matrix.astype(np.float64)
    if not np.all(np.abs(exact) == 1):
        raise ValueError("an entry is neither +1 nor -1")
    small = sylvester(len(exact))
    if small and np.array_equal(reduce(np.kron, small), exact):
        return small
    gram = exact @ exact.T
    wrong = np.argwhere(gram != len(exact) * np.eye(len(exact)))
    if len(wrong):
        first, second = (int(i) for i in wrong[0])
        raise ValueError(f"H H^T is not {len(exact)} I: rows {first} and {second} have product {gram[first, second]:g}")
    return (exact.astype(np.int8),)


def sylvester(order: int) -> tuple[Bytes, ...]:
    """Return Sylvester's matrix of a power of two as factors of order up to 64; nothing for another ``order``."""
    if order < 1 or order & (order - 1):
        return ()
    two = np.array([[1, 1], [1, -1]], np.int8)
    sizes = [_SMALL] * ((order.bit_length() - 1) // 6) + [order >> 6 * ((order.bit_length() - 1) // 6)]
    identity = np.ones((1, 1), np.int8)
    return tuple(reduce(np.kron, [two] * (n.bit_length() - 1), identity) for n in sizes if n > 1) or (identity,)


def _dense(matrix: Doubles) -> Orthogonal:
    """Return ``matrix`` once Q^T (Q r) = r holds for random vectors r, to the rounding of float64 (Freivalds)."""
    probe = np.random.default_rng(0).standard_normal((len(matrix), 4))
    error = np.abs(matrix.T @ (matrix @ probe) - probe).max() if len(matrix) else 0.0
    if not error <= 64 * (isqrt(len(matrix)) + 1) * len(matrix) * np.finfo(np.float64).eps:
        raise ValueError(f"the matrix of width {len(matrix)} is not orthogonal: Q^T Q r is off by {error:.1e}")
    return Orthogonal(len(matrix), dense=matrix)
