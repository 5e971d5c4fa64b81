"""Expressions that move numbers and compute nothing."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from graphopt.graph.weights.expression import Array, Expression, Region, Shape, whole_region

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir


@dataclasses.dataclass(frozen=True, eq=False)
class Transpose(Expression):
    """Axes in another order: axis i is axis ``order[i]`` of the original, as ``numpy.transpose`` has it."""

    source: Expression
    order: tuple[int, ...]

    @property
    def dtype(self) -> ir.DataType:
        """As the original."""
        return self.source.dtype

    @property
    def shape(self) -> Shape:
        """The original's dimensions in the new order."""
        return tuple(self.source.shape[axis] for axis in self.order)

    @property
    def whole(self) -> frozenset[int]:
        """The original's, renumbered."""
        return frozenset(axis for axis, before in enumerate(self.order) if before in self.source.whole)

    def evaluate(self, region: Region) -> Array:
        """Evaluate the region of the original and turn it, without a copy."""
        before = [slice(0)] * len(region)
        for axis, piece in zip(self.order, region, strict=True):
            before[axis] = piece
        return self.source.evaluate(tuple(before)).transpose(self.order)


@dataclasses.dataclass(frozen=True, eq=False)
class Slice(Expression):
    """The coordinates start, start + step, ... of each axis.

    Attributes:
        source: the original.
        pieces: start, stop and step for each axis, as :meth:`cut` normalizes them: stop is -1 where a negative step
            goes down to coordinate 0.
    """

    source: Expression
    pieces: tuple[tuple[int, int, int], ...]

    @classmethod
    def cut(cls, source: Expression, pieces: dict[int, slice]) -> Slice:
        """Return the coordinates of each axis that Python's slices pick; axes without one stay."""
        bounds = [pieces.get(axis, slice(None)).indices(size) for axis, size in enumerate(source.shape)]
        return cls(source, tuple(bounds))

    @property
    def dtype(self) -> ir.DataType:
        """As the original."""
        return self.source.dtype

    @property
    def shape(self) -> Shape:
        """How many coordinates are picked."""
        return tuple(len(range(*piece)) for piece in self.pieces)

    @property
    def whole(self) -> frozenset[int]:
        """As the original."""
        return self.source.whole

    def evaluate(self, region: Region) -> Array:
        """Evaluate the smallest region of the original that holds what is picked."""
        before, inside = [], []
        for (start, _, step), piece in zip(self.pieces, region, strict=True):
            count = piece.stop - piece.start
            first, last = start + piece.start * step, start + (piece.stop - 1) * step
            low = min(first, last) if count else 0
            before.append(slice(low, max(first, last) + 1 if count else 0))
            end = last - low + (1 if step > 0 else -1)
            inside.append(slice(first - low, end if end >= 0 else None, step) if count else slice(0))
        return self.source.evaluate(tuple(before))[tuple(inside)]


@dataclasses.dataclass(frozen=True, eq=False)
class Reshape(Expression):
    """The same numbers, in row-major order, with other dimensions."""

    source: Expression
    dims: Shape

    @classmethod
    def to_dims(cls, source: Expression, dims: Sequence[int]) -> Reshape:
        """Return ``source`` with the dimensions ``dims``, one of which may be -1 for what is left."""
        product = math.prod(size for size in dims if size != -1)
        shape = tuple(math.prod(source.shape) // product if size == -1 else size for size in dims)
        if math.prod(shape) != math.prod(source.shape):
            raise ValueError(f"{list(source.shape)} cannot be reshaped to {list(dims)}")
        return cls(source, shape)

    @property
    def dtype(self) -> ir.DataType:
        """As the original."""
        return self.source.dtype

    @property
    def shape(self) -> Shape:
        """The new dimensions."""
        return self.dims

    @property
    def whole(self) -> frozenset[int]:
        """The original's where only axes of size 1 come and go; else none if the original can be cut anywhere."""
        if self._only_ones_move():
            axes = {self._wide(self.dims)[self._wide(self.source.shape).index(axis)] for axis in self._wide_whole()}
            return frozenset(axes)
        return frozenset() if not self.source.whole else frozenset(range(len(self.dims)))

    def evaluate(self, region: Region) -> Array:
        """Evaluate the region where only axes of size 1 come and go, else the original as a whole."""
        if not self._only_ones_move():
            return self.source.evaluate(whole_region(self.source.shape)).reshape(self.dims)[region]
        before = [slice(0, 1)] * len(self.source.shape)
        for old, new in zip(self._wide(self.source.shape), self._wide(self.dims), strict=True):
            before[old] = region[new]
        sizes = [1 if size == 1 else piece.stop - piece.start for size, piece in zip(self.dims, region, strict=True)]
        inside = tuple(piece if size == 1 else slice(None) for size, piece in zip(self.dims, region, strict=True))
        return self.source.evaluate(tuple(before)).reshape(sizes)[inside]

    def _wide_whole(self) -> set[int]:
        return set(self.source.whole) & set(self._wide(self.source.shape))

    def _only_ones_move(self) -> bool:
        return [n for n in self.source.shape if n != 1] == [n for n in self.dims if n != 1]

    @staticmethod
    def _wide(shape: Shape) -> list[int]:
        return [axis for axis, size in enumerate(shape) if size != 1]


@dataclasses.dataclass(frozen=True, eq=False)
class Concat(Expression):
    """Tensors one behind the other along an axis; all other dimensions and the type agree."""

    parts: tuple[Expression, ...]
    axis: int

    def __post_init__(self) -> None:
        shapes = {(*part.shape[: self.axis], *part.shape[self.axis + 1 :]) for part in self.parts}
        if len(shapes) != 1 or len({part.dtype for part in self.parts}) != 1:
            raise ValueError(f"these cannot be joined along axis {self.axis}: {', '.join(map(str, self.parts))}")

    @property
    def dtype(self) -> ir.DataType:
        """As each of the parts."""
        return self.parts[0].dtype

    @property
    def shape(self) -> Shape:
        """The sizes along the axis add up."""
        first = self.parts[0].shape
        return (*first[: self.axis], sum(part.shape[self.axis] for part in self.parts), *first[self.axis + 1 :])

    @property
    def whole(self) -> frozenset[int]:
        """What any part wants whole."""
        return frozenset().union(*(part.whole for part in self.parts))

    def evaluate(self, region: Region) -> Array:
        """Evaluate the part of each tensor that lies in the region, and join them."""
        ends = list(itertools.accumulate((part.shape[self.axis] for part in self.parts), initial=0))
        window, arrays = region[self.axis], []
        for part, begin, end in zip(self.parts, ends, ends[1:], strict=False):
            piece = slice(max(window.start, begin) - begin, min(window.stop, end) - begin)
            if piece.start < piece.stop:
                arrays.append(part.evaluate((*region[: self.axis], piece, *region[self.axis + 1 :])))
        if not arrays:
            return np.empty([piece.stop - piece.start for piece in region], self.dtype.numpy())
        return np.concatenate(arrays, axis=self.axis)


def stack(parts: Sequence[Expression], axis: int = 0) -> Concat:
    """Return tensors of one shape along a new axis."""
    shapes = [(*part.shape[:axis], 1, *part.shape[axis:]) for part in parts]
    return Concat(tuple(Reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)), axis)
