"""Orthogonal maps that a basis can be rotated by, applied in float64 along one axis of an array."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from graphopt.rotations.hadamard import hadamard, has_hadamard

Doubles = npt.NDArray[np.float64]


class Rotation(Protocol):
    """An orthogonal matrix Q of ``width`` rows and columns."""

    @property
    def width(self) -> int:
        """Rows and columns of Q."""

    @property
    def seed(self) -> int:
        """What Q was drawn from."""

    @property
    def kind(self) -> str:
        """Name it for a report."""

    def apply(self, array: Doubles, axis: int) -> Doubles:
        """Contract ``axis`` of ``array`` with the rows of Q: ``x Q`` on a last axis, ``Q^T W`` on a first."""


@dataclass(frozen=True)
class HadamardRotation:
    """Q = diag(signs) (H_m (x) H_2^k) / sqrt(width), with width = m 2^k and signs drawn from ``seed``.

    The randomized Hadamard transform of QuIP# (Tseng et al. 2024, section 3) and QuaRot (Ashkboos et al. 2024,
    section 3); the factor of a power of two is applied as a fast transform.
    """

    width: int
    seed: int

    @property
    def kind(self) -> str:
        """Name it for a report, with its factors."""
        odd, power = self._factors
        return f"Hadamard {self.width}" if odd == 1 else f"Hadamard {self.width} = {odd} x {power}"

    @cached_property
    def _factors(self) -> tuple[int, int]:
        power = self.width & -self.width
        while not has_hadamard(self.width // power):
            power //= 2
        return self.width // power, power

    @cached_property
    def signs(self) -> Doubles:
        """The diagonal of +1 and -1, [width]."""
        return np.random.default_rng(self.seed).choice([-1.0, 1.0], self.width)

    def apply(self, array: Doubles, axis: int) -> Doubles:
        """Contract ``axis`` of ``array`` with the rows of Q."""
        odd, power = self._factors
        last = np.moveaxis(array, axis, -1)
        blocks = (last * self.signs).reshape(*last.shape[:-1], odd, power)
        if odd > 1:
            blocks = np.einsum("...it,ij->...jt", blocks, hadamard(odd).astype(np.float64), optimize=True)
        blocks = _fast_walsh_hadamard(blocks) / np.sqrt(self.width)
        return np.moveaxis(blocks.reshape(last.shape), -1, axis)


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


def rotation_for(width: int, kind: Literal["hadamard", "random"], seed: int) -> Rotation:
    """Return a rotation of ``width``; a random one where no Hadamard matrix of that order can be constructed.

    A rotation that is fused into weights costs nothing at run time, so a dense one is as good there as a fast one.
    """
    if kind == "hadamard" and has_hadamard(width):
        return HadamardRotation(width, seed)
    return RandomRotation(width, seed)


def _fast_walsh_hadamard(blocks: Doubles) -> Doubles:
    """Multiply the last axis, a power of two, by Sylvester's H, in n log n additions."""
    width = blocks.shape[-1]
    half = 1
    while half < width:
        pairs = blocks.reshape(*blocks.shape[:-1], width // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        blocks = np.stack([low + high, low - high], axis=-2).reshape(blocks.shape)
        half *= 2
    return blocks
