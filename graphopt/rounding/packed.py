"""Codes, scales and zero points in the layout of ``ai.graphopt::MatMulTable``, packed when they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.formats import FORMATS
from graphopt.formats.table import TableFormat
from graphopt.runtime_ops.matmul_table.spec.packing import TILE, UNIT, pack, tile
from graphopt.weights import lazy

Array = npt.NDArray[Any]


def packed_tensors(
    table: TableFormat,
    shape: tuple[int, int],
    group: int,
    dtype: ir.DataType,
    *,
    codes: Callable[[], npt.NDArray[np.uint8]],
    scales: Callable[[], Array],
    zero_points: Callable[[], npt.NDArray[np.uint8]] | None,
) -> dict[str, ir.TensorProtocol]:
    """Return ``codes``, ``scales`` and, where there are any, ``zero_points``, all lazy.

    Args:
        table: the format.
        shape: rows and columns of the matrix.
        group: rows that share a scale; the last group may have fewer.
        dtype: type of scales and zero points.
        codes: makes codes [rows, columns].
        scales: makes scales [groups, columns].
        zero_points: makes the codes that mean 0, [groups, columns].
    """
    rows, columns = shape
    tiles = -(-columns // TILE)
    packed, small = (tiles, -(-rows // UNIT), 32 * table.bits), (tiles, -(-rows // group), TILE)
    parts: dict[str, ir.TensorProtocol] = {
        "codes": lazy(lambda: pack(codes(), table.bits), ir.DataType.UINT8, packed),
        "scales": lazy(lambda: tile(_exactly(scales(), dtype)), dtype, small),
    }
    if zero_points is not None:
        make = zero_points  # of the two types, the one that is left here
        parts["zero_points"] = lazy(lambda: tile(_exactly(table.decode(make()), dtype)), dtype, small)
    return parts


def repacked_tensors(dequantize: ir.Node, dtype: ir.DataType) -> dict[str, ir.TensorProtocol]:
    """Return what :func:`packed_tensors` does, of the codes that a ``DequantizeLinear`` reads along its first axis."""
    stored = [None if value is None else value.const_value for value in dequantize.inputs]
    codes, scales, zero_points = (*stored, None)[:3]
    assert codes is not None and scales is not None
    table = format_of_codes(codes.dtype)
    assert table is not None
    rows, columns = codes.shape.numpy()
    return packed_tensors(
        table,
        (rows, columns),
        dequantize.attributes.get_int("block_size", rows),
        dtype,
        codes=lambda: _indices(codes, table.bits),
        scales=scales.numpy,
        zero_points=None if zero_points is None else lambda: _indices(zero_points, table.bits),
    )


def format_of_codes(dtype: ir.DataType) -> TableFormat | None:
    """Return the format whose codes ONNX stores as integers of this type, if there is one."""
    named = (table for table in FORMATS.values() if table.onnx_type == dtype)
    return next(named, None) if dtype.is_integer() else None


def _indices(tensor: ir.TensorProtocol, bits: int) -> npt.NDArray[np.uint8]:
    # Two's complement: the code is the number modulo 2^bits.
    return np.asarray((tensor.numpy().astype(np.int16) & (2**bits - 1)).astype(np.uint8))


def _exactly(numbers: Array, dtype: ir.DataType) -> Array:
    kept = numbers.astype(dtype.numpy())
    if not np.array_equal(kept.astype(np.float64), numbers.astype(np.float64)):
        raise ValueError(f"scales or zero points are no numbers of {dtype.name}, which they were promised as")
    return kept
