"""The codes, scales and zero points of one weight, as tensors that are computed when they are written."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.formats.table import TableFormat
from graphopt.rounding.nearest import Quantized, round_to_nearest
from graphopt.weights import lazy


class LazyQuantized:
    """Quantizes ``weight`` when one of its parts is first read.

    Codes are handed out and forgotten, since they are large; scales and zero points, a few percent of them, are kept.

    Args:
        weight: an initializer, [rows, columns]; groups run along the rows.
        table: the format.
        group: rows that share a scale.
        scale: how scales are chosen, see :func:`graphopt.rounding.round_to_nearest`.
        transposed: groups run along the columns instead, as a table that is looked up by row wants it.

    Scales are of the type of the weight; codes are chosen for them as they are stored.

    Raises:
        ValueError: ONNX has no type for the format.
    """

    def __init__(
        self,
        weight: ir.Value,
        table: TableFormat,
        group: int,
        scale: Literal["extreme", "least_squares"],
        *,
        transposed: bool = False,
    ) -> None:
        assert weight.const_value is not None
        if table.onnx_type is None:
            raise ValueError(f"ONNX has no type for {table.name}")
        self._type: ir.DataType = table.onnx_type
        self._source, self._table, self._group, self._scale = weight.const_value, table, group, scale
        self._transposed = transposed
        self._small: dict[str, npt.NDArray[Any]] = {}

    def tensors(self) -> dict[str, ir.TensorProtocol]:
        """Return ``codes``, ``scales`` and, where the format has them, ``zero_points``, all lazy."""
        rows, columns = self._source.shape.numpy()
        axis = 1 if self._transposed else 0
        groups = -(-(rows, columns)[axis] // self._group)
        small = (rows, groups) if self._transposed else (groups, columns)
        parts: dict[str, ir.TensorProtocol] = {
            "codes": lazy(self._codes, self._type, (rows, columns)),
            "scales": lazy(lambda: self._kept("scales"), self._source.dtype, small),
        }
        if self._table.zero_point:
            parts["zero_points"] = lazy(lambda: self._kept("zero_points"), self._type, small)
        return parts

    def _codes(self) -> npt.NDArray[Any]:
        return self._turned(self._table.to_onnx(self._quantize().codes))

    def _kept(self, part: str) -> npt.NDArray[Any]:
        if not self._small:
            self._quantize()
        return self._small[part]

    def _quantize(self) -> Quantized:
        matrix = self._turned(np.asarray(self._source.numpy(), dtype=np.float32))
        stored = np.float32 if self._source.dtype.bitwidth > 16 else self._source.dtype.numpy()
        quantized = round_to_nearest(matrix, self._table, self._group, self._scale, scale_type=stored)
        self._small["scales"] = self._turned(quantized.scales)
        if quantized.zero_points is not None:
            self._small["zero_points"] = self._turned(self._table.to_onnx(quantized.zero_points))
        return quantized

    def _turned(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array.T if self._transposed else array
