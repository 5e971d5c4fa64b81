"""The layout of ``ai.graphopt::MatMulTable`` as expressions: there and back."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights import Array, Expression, Region, Shape
from graphopt.graph.weights.expression import widen
from graphopt.runtime_ops.matmul_table.spec.packing import (
    DIGIT_BYTES,
    TILE,
    UNIT,
    pack,
    pack_digits,
    tile,
    unpack,
    untile,
)

if TYPE_CHECKING:
    from graphopt.numerics.formats import Format


@dataclasses.dataclass(frozen=True, eq=False)
class PackCodes(Expression):
    """Code indices [rows, columns] of ``bits`` bits in tiles and bit planes: uint8 [tiles, units, 32 bits]."""

    source: Expression
    bits: int

    @property
    def dtype(self) -> ir.DataType:
        """Bytes."""
        return ir.DataType.UINT8

    @property
    def shape(self) -> Shape:
        """Tiles of columns, units of rows, and the bytes of a unit."""
        rows, columns = self.source.shape
        return (-(-columns // TILE), -(-rows // UNIT), 32 * self.bits)

    def evaluate(self, region: Region) -> Array:
        """Pack all codes."""
        return pack(self.source.numpy(), self.bits)[region]


@dataclasses.dataclass(frozen=True, eq=False)
class DigitCodes(Expression):
    """Packed codes of 2 bits, none of them 3, as digits of base 3: uint8 [..., tiles, units, 52]."""

    source: Expression

    @property
    def dtype(self) -> ir.DataType:
        """Bytes."""
        return ir.DataType.UINT8

    @property
    def shape(self) -> Shape:
        """Units have fewer bytes."""
        return (*self.source.shape[:-1], DIGIT_BYTES)

    @property
    def whole(self) -> frozenset[int]:
        """Units, and what the packed codes want whole."""
        return self.source.whole | {len(self.shape) - 1}

    def evaluate(self, region: Region) -> Array:
        """Pack units in the region once more.

        Raises:
            ValueError: a code is 3.
        """
        units = widen(region, len(region) - 1, self.source.shape[-1])
        return pack_digits(self.source.evaluate(units))[..., region[-1]]


@dataclasses.dataclass(frozen=True, eq=False)
class TileScales(Expression):
    """Numbers [groups, columns] as [tiles, groups, 16], in a type that holds each of them exactly.

    Attributes:
        source: scales, or zero points as codes.
        target_type: the type.
        format: the format whose codes they are, or ``None`` where they are numbers.
    """

    source: Expression
    target_type: ir.DataType
    format: Format | None = None

    @property
    def dtype(self) -> ir.DataType:
        """The new type."""
        return self.target_type

    @property
    def shape(self) -> Shape:
        """Tiles of columns, groups, and the columns of a tile."""
        groups, columns = self.source.shape
        return (-(-columns // TILE), groups, TILE)

    def evaluate(self, region: Region) -> Array:
        """Decode, cast and tile all numbers.

        Raises:
            ValueError: the type does not hold them exactly.
        """
        numbers = self.source.numpy()
        numbers = numbers if self.format is None else self.format.decode(numbers)
        narrow = numbers.astype(self.target_type.numpy())
        if not np.array_equal(narrow.astype(np.float64), numbers.astype(np.float64)):
            raise ValueError(
                f"scales or zero points are promised as {self.target_type.name}, which does not hold all of them"
            )
        return tile(narrow)[region]


@dataclasses.dataclass(frozen=True, eq=False)
class UnpackCodes(Expression):
    """What :class:`PackCodes` was made of: uint8 [rows, columns]."""

    source: Expression
    rows: int
    columns: int

    @property
    def dtype(self) -> ir.DataType:
        """Bytes."""
        return ir.DataType.UINT8

    @property
    def shape(self) -> Shape:
        """Rows and columns of the matrix."""
        return (self.rows, self.columns)

    def evaluate(self, region: Region) -> Array:
        """Unpack all codes."""
        return unpack(self.source.numpy(), self.rows, self.columns)[region]


@dataclasses.dataclass(frozen=True, eq=False)
class UntileScales(Expression):
    """What :class:`TileScales` was made of: numbers [groups, columns]."""

    source: Expression
    columns: int

    @property
    def dtype(self) -> ir.DataType:
        """As it is."""
        return self.source.dtype

    @property
    def shape(self) -> Shape:
        """Groups and columns of the matrix."""
        return (self.source.shape[1], self.columns)

    def evaluate(self, region: Region) -> Array:
        """Take all tiles apart."""
        return untile(self.source.numpy(), self.columns)[region]
