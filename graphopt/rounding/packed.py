"""Codes, scales and zero points in the layout of ``ai.graphopt::MatMulTable``, as expressions."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from graphopt.formats import FORMATS
from graphopt.formats.table import TableFormat
from graphopt.rounding.expressions import CodeIndices
from graphopt.runtime_ops.matmul_table.spec.packing import TILE, UNIT, pack, tile
from graphopt.weights import Array, Expression, Region, Shape, WeightTensor, expression_of


@dataclasses.dataclass(frozen=True, eq=False)
class Packed(Expression):
    """Code indices [rows, columns] of ``bits`` bits in tiles and bit planes: uint8 [tiles, units, 32 bits]."""

    of: Expression
    bits: int

    @property
    def dtype(self) -> ir.DataType:
        """Bytes."""
        return ir.DataType.UINT8

    @property
    def shape(self) -> Shape:
        """Tiles of columns, units of rows, and the bytes of a unit."""
        rows, columns = self.of.shape
        return (-(-columns // TILE), -(-rows // UNIT), 32 * self.bits)

    def evaluate(self, region: Region) -> Array:
        """Pack all codes."""
        return pack(self.of.numpy(), self.bits)[region]


@dataclasses.dataclass(frozen=True, eq=False)
class Tiled(Expression):
    """Numbers [groups, columns] as [tiles, groups, 16], in a type that holds each of them exactly.

    Attributes:
        of: scales, or zero points as codes.
        to: the type.
        table: the format whose codes they are, or ``None`` where they are numbers.
    """

    of: Expression
    to: ir.DataType
    table: TableFormat | None = None

    @property
    def dtype(self) -> ir.DataType:
        """The new type."""
        return self.to

    @property
    def shape(self) -> Shape:
        """Tiles of columns, groups, and the columns of a tile."""
        groups, columns = self.of.shape
        return (-(-columns // TILE), groups, TILE)

    def evaluate(self, region: Region) -> Array:
        """Decode, cast and tile all numbers.

        Raises:
            ValueError: the type does not hold them exactly.
        """
        numbers = self.of.numpy()
        numbers = numbers if self.table is None else self.table.decode(numbers)
        kept = numbers.astype(self.to.numpy())
        if not np.array_equal(kept.astype(np.float64), numbers.astype(np.float64)):
            raise ValueError(f"scales or zero points are promised as {self.to.name}, which does not hold all of them")
        return tile(kept)[region]


def packed_tensors(
    table: TableFormat,
    dtype: ir.DataType,
    *,
    codes: Expression,
    scales: Expression,
    zero_points: Expression | None,
) -> dict[str, ir.TensorProtocol]:
    """Return ``codes``, ``scales`` and, where there are any, ``zero_points``, none of them evaluated.

    Args:
        table: the format.
        dtype: type of scales and zero points.
        codes: [rows, columns], of the integer type that ONNX has for the format, or places in its table as uint8.
        scales: [groups, columns].
        zero_points: the codes that mean 0, [groups, columns].
    """
    parts: dict[str, ir.TensorProtocol] = {
        "codes": WeightTensor(Packed(CodeIndices(codes, table.bits), table.bits)),
        "scales": WeightTensor(Tiled(scales, dtype)),
    }
    if zero_points is not None:
        parts["zero_points"] = WeightTensor(Tiled(CodeIndices(zero_points, table.bits), dtype, table))
    return parts


def repacked_tensors(dequantize: ir.Node, dtype: ir.DataType) -> dict[str, ir.TensorProtocol]:
    """Return what :func:`packed_tensors` does, of the codes that a ``DequantizeLinear`` reads along its first axis."""
    stored = [None if value is None else value.const_value for value in dequantize.inputs]
    codes, scales, zero_points = (*stored, None)[:3]
    assert codes is not None and scales is not None
    table = format_of_codes(codes.dtype)
    assert table is not None
    return packed_tensors(
        table,
        dtype,
        codes=expression_of(codes),
        scales=expression_of(scales),
        zero_points=None if zero_points is None else expression_of(zero_points),
    )


def format_of_codes(dtype: ir.DataType) -> TableFormat | None:
    """Return the format whose codes ONNX stores as integers of this type, if there is one."""
    named = (table for table in FORMATS.values() if table.onnx_type == dtype)
    return next(named, None) if dtype.is_integer() else None
