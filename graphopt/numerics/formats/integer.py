"""Integers: two's complement, unsigned with a zero point, and the three values -1, 0, 1."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.numerics.formats.table import TableFormat


def signed_integer(bits: int, onnx_type: ir.DataType | None = None) -> TableFormat:
    """Return two's complement ``int<bits>``: -2^(bits-1) .. 2^(bits-1) - 1."""
    half = 2 ** (bits - 1)
    table = tuple(float(code if code < half else code - 2 * half) for code in range(2 * half))
    return TableFormat(f"int{bits}", bits, table, onnx_type)


def unsigned_integer(bits: int, onnx_type: ir.DataType | None = None) -> TableFormat:
    """Return ``uint<bits>``, 0 .. 2^bits - 1, with a zero point per group."""
    return TableFormat(f"uint{bits}", bits, tuple(float(c) for c in range(2**bits)), onnx_type, zero_point=True)


INT2 = signed_integer(2, ir.DataType.INT2)
INT3 = signed_integer(3)
INT4 = signed_integer(4, ir.DataType.INT4)
INT5 = signed_integer(5)
INT6 = signed_integer(6)
INT7 = signed_integer(7)
INT8 = signed_integer(8, ir.DataType.INT8)
UINT2 = unsigned_integer(2, ir.DataType.UINT2)
UINT3 = unsigned_integer(3)
UINT4 = unsigned_integer(4, ir.DataType.UINT4)
UINT5 = unsigned_integer(5)
UINT6 = unsigned_integer(6)
UINT7 = unsigned_integer(7)
UINT8 = unsigned_integer(8, ir.DataType.UINT8)

TERNARY = TableFormat("ternary", 2, (-1.0, 0.0, 1.0))
"""-1, 0, 1 as codes 0, 1, 2 of 2 bits (Li et al. 2016, Ternary weight networks; Ma et al. 2024, BitNet)."""
