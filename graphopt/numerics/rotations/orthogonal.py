"""Orthogonal maps that a basis can be rotated by, applied in float64 along one axis of an array."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, Protocol

import numpy as np

from graphopt.numerics.rotations.claims import RotationClaim
from graphopt.numerics.rotations.hadamard import Signs
from graphopt.numerics.rotations.hadamard import factors as largest_factors
from graphopt.numerics.rotations.transform import Doubles, pair, transform

_CHUNK = 1 << 18  # coordinates that are transformed at a time: 2 MB, which stays in a cache


class Rotation(Protocol):
    """An orthogonal matrix Q of ``width`` rows and columns."""

    @property
    def width(self) -> int:
        """Rows and columns of Q."""

    @property
    def seed(self) -> int | None:
        """The seed that Q was drawn from; None where nothing was drawn."""

    @property
    def kind(self) -> str:
        """Name it for a report."""

    def apply(self, array: Doubles, axis: int) -> Doubles:
        """Contract ``axis`` of ``array`` with the rows of Q: ``x Q`` on a last axis, ``Q^T W`` on a first."""

    def claim(self) -> RotationClaim:
        """Return the data from which Q can be built again."""


def signs(width: int, seed: int) -> Doubles:
    """Return ``width`` times +1 or -1, float64: sign i is bit i mod 64 of word i // 64 of PCG64's stream, 1 for -1.

    NumPy keeps the streams of its bit generators from version to version, but not what ``Generator`` makes of them
    (NEP 19), and a claim has to mean the same matrix later.
    """
    words = np.random.PCG64(seed).random_raw(-(-width // 64))
    index = np.arange(width, dtype=np.uint64)
    bits = words[index // 64] >> index % 64 & 1
    return 1.0 - 2.0 * bits.astype(np.float64)


@dataclass(frozen=True)
class HadamardRotation:
    """Q = diag(signs) (I_blocks (x) H_f1 (x) H_f2 ...) / sqrt(f1 f2 ...), no signs if ``seed`` is None.

    The randomized Hadamard transform of QuIP# (Tseng et al. 2024, section 3) and QuaRot (Ashkboos et al. 2024,
    section 3). A ``width`` that no Hadamard matrix known here has is cut into blocks of the largest order that divides
    it.
    """

    width: int
    seed: int | None

    @property
    def kind(self) -> str:
        """Name it for a report, with its factors."""
        order = prod(self.factors)
        if self.blocks > 1:
            return f"Hadamard in {self.blocks} blocks of {order}, since no order {self.width} is known"
        product = f" = {' x '.join(map(str, self.factors))}" if len(self.factors) > 1 else ""
        return f"Hadamard {order}{product}"

    @property
    def factors(self) -> tuple[int, ...]:
        """The orders f1, f2, ... of the Hadamard matrices, leftmost first."""
        return largest_factors(self.width)

    @property
    def blocks(self) -> int:
        """How many runs of coordinates are transformed each by itself."""
        return self.width // prod(self.factors)

    @property
    def pair(self) -> tuple[Signs, Signs]:
        """Two matrices, int8 [a, a] and [b, b], whose Kronecker product is that of all factors; a + b is least."""
        return pair(self.factors)

    def apply(self, array: Doubles, axis: int) -> Doubles:
        """Contract ``axis`` of ``array`` with the rows of Q.

        Every run of coordinates along ``axis`` is computed in the same way whatever the rest of ``array`` is, so a
        tensor that is rotated in pieces is the same to the bit as one that is rotated whole.
        """
        last = np.moveaxis(array, axis, -1)
        rows = last.reshape(-1, self.width)
        rotated_rows = np.empty(rows.shape)
        diagonal = np.ones(self.width) if self.seed is None else signs(self.width, self.seed)
        step = max(1, _CHUNK // self.width)
        for start in range(0, len(rows), step):
            piece = slice(start, start + step)
            rotated_rows[piece] = transform(np.multiply(rows[piece], diagonal, order="C"), self.factors)
        rotated_rows /= np.sqrt(prod(self.factors))
        return np.moveaxis(rotated_rows.reshape(last.shape), -1, axis)

    def claim(self) -> RotationClaim:
        """Return the data from which Q can be built again."""
        return RotationClaim(kind="hadamard", width=self.width, factors=self.factors, seed=self.seed)


@dataclass(frozen=True)
class RandomRotation:
    """Q of a Gaussian matrix's QR decomposition: uniform over the orthogonal group (Stewart 1980), dense."""

    width: int
    seed: int

    @property
    def kind(self) -> str:
        """Name it for a report."""
        return f"random orthogonal {self.width}"

    @cached_property
    def matrix(self) -> Doubles:
        """Q itself, [width, width]."""
        q, r = np.linalg.qr(np.random.default_rng(self.seed).standard_normal((self.width, self.width)))
        return np.asarray(q * np.sign(np.diag(r)))

    def apply(self, array: Doubles, axis: int) -> Doubles:
        """Contract ``axis`` of ``array`` with the rows of Q."""
        return np.moveaxis(np.moveaxis(array, axis, -1) @ self.matrix, -1, axis)

    def claim(self) -> RotationClaim:
        """Return the data from which Q can be drawn again, by the same NumPy and LAPACK."""
        return RotationClaim(kind="random", width=self.width, seed=self.seed)


def rotation_for(width: int, kind: Literal["hadamard", "random"], seed: int) -> Rotation:
    """Return a rotation of ``width``; "hadamard" has blocks where no matrix of that order is known here."""
    return HadamardRotation(width, seed) if kind == "hadamard" else RandomRotation(width, seed)
