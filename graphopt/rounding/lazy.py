"""The codes, scales and zero points of one weight, as tensors that are computed when they are written."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.formats.table import TableFormat
from graphopt.rounding.half import fits_half
from graphopt.rounding.nearest import Quantized, round_to_nearest
from graphopt.rounding.packed import packed_tensors
from graphopt.weights import lazy


class LazyQuantized:
    """Quantizes ``weight`` when one of its parts is first read.

    Codes are handed out and forgotten, since they are large; scales and zero points, a few percent of them, are kept.

    Args:
        weight: an initializer, [rows, columns]; groups run along the rows.
        table: the format.
        group: rows that share a scale; the last group may have fewer.
        scale: how scales are chosen, see :func:`graphopt.rounding.round_to_nearest`.
        transposed: groups run along the columns instead, as a table that is looked up by row wants it.
        half: round scales to float16 where all of them are normal numbers there. This reads the weight once, at once:
            the types of a graph must be known before its numbers are.

    Attributes:
        half: whether scales are rounded to float16.
    """

    def __init__(
        self,
        weight: ir.Value,
        table: TableFormat,
        group: int,
        scale: Literal["extreme", "least_squares"],
        *,
        transposed: bool = False,
        half: bool = False,
    ) -> None:
        assert weight.const_value is not None
        self._source, self._table, self._group, self._scale = weight.const_value, table, group, scale
        self._transposed = transposed
        self._small: dict[str, npt.NDArray[Any]] = {}
        self.half = half and fits_half(self._matrix(), table, group)

    def tensors(self) -> dict[str, ir.TensorProtocol]:
        """Return ``codes``, ``scales`` and, where the format has them, ``zero_points``, all lazy.

        Scales have the weight's own type, as ``DequantizeLinear`` wants it, also where they are rounded to float16.

        Raises:
            ValueError: ONNX has no type for the format.
        """
        rows, columns = self._source.shape.numpy()
        groups = -(-(columns if self._transposed else rows) // self._group)
        small = (rows, groups) if self._transposed else (groups, columns)
        onnx_type = self._table.onnx_type
        if onnx_type is None:
            raise ValueError(f"ONNX has no type for {self._table.name}")
        parts: dict[str, ir.TensorProtocol] = {
            "codes": lazy(lambda: self._turned(self._table.to_onnx(self._codes())), onnx_type, (rows, columns)),
            "scales": lazy(lambda: self._turned(self._kept("scales")), self._source.dtype, small),
        }
        if self._table.zero_point:
            points = lazy(lambda: self._turned(self._table.to_onnx(self._kept("zero_points"))), onnx_type, small)
            parts["zero_points"] = points
        return parts

    def packed(self) -> dict[str, ir.TensorProtocol]:
        """Return the same, lazy too, in the layout of ``MatMulTable``."""
        assert not self._transposed
        rows, columns = self._source.shape.numpy()
        return packed_tensors(
            self._table,
            (rows, columns),
            self._group,
            ir.DataType.FLOAT16 if self.half else ir.DataType.FLOAT,
            codes=self._codes,
            scales=lambda: self._kept("scales"),
            zero_points=(lambda: self._kept("zero_points")) if self._table.zero_point else None,
        )

    def _codes(self) -> npt.NDArray[np.uint8]:
        return self._quantize().codes

    def _kept(self, part: str) -> npt.NDArray[Any]:
        if not self._small:
            self._quantize()
        return self._small[part]

    def _quantize(self) -> Quantized:
        stored = np.float16 if self.half else self._source.dtype.numpy()
        quantized = round_to_nearest(self._matrix(), self._table, self._group, self._scale, scale_type=stored)
        self._small["scales"] = quantized.scales
        if quantized.zero_points is not None:
            self._small["zero_points"] = quantized.zero_points
        return quantized

    def _matrix(self) -> npt.NDArray[np.float32]:
        return self._turned(np.asarray(self._source.numpy(), dtype=np.float32))

    def _turned(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array.T if self._transposed else array
