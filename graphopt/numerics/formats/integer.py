"""Integers: two's complement, unsigned with a zero point, and the three values -1, 0, 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.numerics.formats.table import TableFormat

if TYPE_CHECKING:
    import onnx_ir as ir


def signed_integer(bits: int, onnx_type: ir.DataType | None = None) -> TableFormat:
    """Return two's complement ``int<bits>``: -2^(bits-1) .. 2^(bits-1) - 1."""
    half = 2 ** (bits - 1)
    table = tuple(float(code if code < half else code - 2 * half) for code in range(2 * half))
    return TableFormat(f"int{bits}", bits, table, onnx_type)


def unsigned_integer(bits: int, onnx_type: ir.DataType | None = None) -> TableFormat:
    """Return ``uint<bits>``, 0 .. 2^bits - 1, with a zero point per group."""
    return TableFormat(f"uint{bits}", bits, tuple(float(c) for c in range(2**bits)), onnx_type, zero_point=True)


def ternary() -> TableFormat:
    """Return -1, 0, 1 as codes 0, 1, 2 of 2 bits (Li et al. 2016, Ternary weight networks; Ma et al. 2024, BitNet)."""
    return TableFormat("ternary", 2, (-1.0, 0.0, 1.0))
