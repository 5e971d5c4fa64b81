"""Expressions that compute: casts, scales, sums, exponentials, means, products with a vector, rotations."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphopt.graph.weights.expression import Array, Expression, Region, Shape, blocks_of, whole_region, widen
from graphopt.graph.weights.same_shape import SameShape
from graphopt.numerics.rotations import HadamardRotation, RandomRotation, Rotation

if TYPE_CHECKING:
    from graphopt.numerics.rotations.claims import RotationClaim

DOUBLE = ir.DataType.DOUBLE


@dataclasses.dataclass(frozen=True, eq=False)
class Cast(SameShape):
    """Each number rounded to another type, to nearest even.

    Attributes:
        target: the type.
        saturate: finite numbers beyond the type's range become its ends. Without it they become infinite.
    """

    target: ir.DataType
    saturate: bool = False

    @property
    def dtype(self) -> ir.DataType:
        """The new type."""
        return self.target

    def evaluate(self, region: Region) -> Array:
        """Cast what lies in the region."""
        numbers = self.source.evaluate(region)
        if self.saturate:
            limit = float(ml_dtypes.finfo(self.target.numpy()).max)  # type: ignore[no-untyped-call]
            numbers = np.where(np.isfinite(numbers), np.clip(numbers, -limit, limit), numbers)
        return numbers.astype(self.target.numpy(), copy=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Scale(SameShape):
    """diag(factors) W along ``axis``: coordinate i times factors[i], in the type of ``source``."""

    factors: Expression
    axis: int

    def evaluate(self, region: Region) -> Array:
        """Multiply what lies in the region."""
        factors = self.factors.evaluate((region[self.axis],))
        spread = [1] * len(region)
        spread[self.axis] = -1
        return np.asarray(factors.reshape(spread) * self.source.evaluate(region), self.dtype.numpy())


@dataclasses.dataclass(frozen=True, eq=False)
class Sum(SameShape):
    """The sum of two tensors of one shape, in the type of ``source``."""

    addend: Expression

    def evaluate(self, region: Region) -> Array:
        """Add what lies in the region."""
        return np.asarray(self.source.evaluate(region) + self.addend.evaluate(region), self.dtype.numpy())


@dataclasses.dataclass(frozen=True, eq=False)
class Exponential(SameShape):
    """factor exp(W), number by number, computed in float64 and rounded once to the type of ``source``."""

    factor: float = 1.0

    def evaluate(self, region: Region) -> Array:
        """Compute what lies in the region."""
        numbers = self.source.evaluate(region).astype(np.float64)
        return np.asarray(self.factor * np.exp(numbers), self.dtype.numpy())


@dataclasses.dataclass(frozen=True, eq=False)
class _RunMap(SameShape):
    """Maps runs of coordinates along ``axis``: those from each of ``starts`` on, ``width`` each. The rest stays."""

    axis: int
    starts: tuple[int, ...]

    @property
    def whole(self) -> frozenset[int]:
        """The axis, and what the original wants whole."""
        return self.source.whole | {self.axis}

    def _map_runs(self, region: Region, width: int) -> Array:
        array: Array = np.require(
            self.source.evaluate(widen(region, self.axis, self.shape[self.axis])), requirements=["W"]
        )
        for block in blocks_of(array.shape, self.axis):
            for start in self.starts:
                piece = (*block[: self.axis], slice(start, start + width), *block[self.axis + 1 :])
                array[piece] = self._map(array[piece])
        cut: Array = array[(*whole_region(array.shape)[: self.axis], region[self.axis])]
        return cut

    def _map(self, run: Array) -> Array:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class Center(_RunMap):
    """The mean of each run along ``axis`` taken away: W (I - 1 1^T / width)."""

    width: int

    def evaluate(self, region: Region) -> Array:
        """Center what lies in the region; the axis is evaluated whole."""
        return self._map_runs(region, self.width)

    def _map(self, run: Array) -> Array:
        # NumPy sums contiguous runs pairwise, and others one by one: always the first, whatever the region is.
        last = np.ascontiguousarray(np.moveaxis(run, self.axis, -1))
        return np.asarray(run - np.moveaxis(last.mean(-1, keepdims=True), -1, self.axis))


@dataclasses.dataclass(frozen=True, eq=False)
class Rotate(_RunMap):
    """Each run along ``axis`` times an orthogonal matrix Q: W Q on a last axis, Q^T W on a first.

    Attributes:
        claim: what Q is.
    """

    claim: RotationClaim

    @property
    def whole(self) -> frozenset[int]:
        """The axis; all axes where Q is dense, since BLAS sums a product of another shape in another order."""
        return super().whole if self.claim.kind == "hadamard" else frozenset(range(len(self.shape)))

    def evaluate(self, region: Region) -> Array:
        """Rotate what lies in the region; the axis is evaluated whole."""
        if self.claim.kind == "hadamard":
            return self._map_runs(region, self.claim.width)
        return self._map_runs(whole_region(self.shape), self.claim.width)[region]

    def _map(self, run: Array) -> Array:
        return rotation_of(self.claim).apply(run, self.axis)


@dataclasses.dataclass(frozen=True, eq=False)
class VectorTimes(Expression):
    """b W for a vector b [rows] and a matrix W [rows, columns], in float64: [columns]. Or for several, b [n, rows]."""

    vector: Expression
    matrix: Expression

    @property
    def dtype(self) -> ir.DataType:
        """float64."""
        return DOUBLE

    @property
    def shape(self) -> Shape:
        """The columns of the matrix, for each vector."""
        return self.vector.shape[:-1] + self.matrix.shape[1:]

    def evaluate(self, region: Region) -> Array:
        """Multiply block by block of all columns: BLAS sums a product of another shape in another order."""
        b = self.vector.numpy().astype(np.float64)
        blocks = (self.matrix.evaluate(block).astype(np.float64) for block in blocks_of(self.matrix.shape, 0))
        # Vector by vector: how a product of matrices is summed depends on the threads that share it.
        products = [np.stack([row @ block for row in b]) if b.ndim > 1 else b @ block for block in blocks]
        return np.concatenate(products, axis=-1)[region]


def rotation_of(claim: RotationClaim) -> Rotation:
    """Return the rotation that a claim describes.

    Raises:
        ValueError: a Hadamard rotation of this width has other factors here than the claim says.
    """
    if claim.kind == "random":
        assert claim.seed is not None
        return RandomRotation(claim.width, claim.seed)
    rotation = HadamardRotation(claim.width, claim.seed)
    if rotation.factors != claim.factors:
        raise ValueError(f"a Hadamard rotation of width {claim.width} has the factors {rotation.factors}, not {claim}")
    return rotation
