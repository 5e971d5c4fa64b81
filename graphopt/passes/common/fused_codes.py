"""Codes as onnxruntime's fused products hold them, ``MatMulNBits`` and ``QMoE``, one by one."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights import Array, Expression, Region, Shape

CODE_TYPES = {4: (ir.DataType.INT4, ir.DataType.UINT4), 8: (ir.DataType.INT8, ir.DataType.UINT8)}
"""The signed and the unsigned type of codes, by bits."""


@dataclasses.dataclass(frozen=True, eq=False)
class SpreadCodes(Expression):
    """Codes or zero points of ``MatMulNBits`` or of an expert of ``QMoE``: [rows, columns] of bytes [columns, ...].

    Attributes:
        source: uint8; the bytes of a column lie side by side, its first code in the lowest bits of the first.
        bits: of a code, 4 or 8.
        rows: codes of a column; a column may be padded.
        columns: as many as products have outputs.
        code_type: of a code; of a signed one half of the codes is taken off, the zero point of products without any.
    """

    source: Expression
    bits: int
    rows: int
    columns: int
    code_type: ir.DataType

    @property
    def dtype(self) -> ir.DataType:
        """The type of a code."""
        return self.code_type

    @property
    def shape(self) -> Shape:
        """Rows and columns."""
        return (self.rows, self.columns)

    def evaluate(self, region: Region) -> Array:
        """Take all bytes apart."""
        codes = self.source.numpy().reshape(self.columns, -1)
        if self.bits < 8:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(self.columns, -1)
        rows = codes[:, : self.rows].T[region]
        if self.code_type.is_signed():
            rows = rows.astype(np.int16) - (1 << (self.bits - 1))
        return rows.astype(self.code_type.numpy())
