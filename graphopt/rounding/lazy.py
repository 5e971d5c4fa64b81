"""The codes, scales and zero points of one weight, as tensors that are evaluated when they are written."""

from __future__ import annotations

from functools import cached_property

import onnx_ir as ir

from graphopt.formats.table import TableFormat
from graphopt.rounding.expressions import RoundedToNearest, Scale, parts_of
from graphopt.rounding.half import fits_half
from graphopt.weights import Cast, Expression, WeightTensor, expression_of


def quantized(
    weight: ir.TensorProtocol | None,
    table: TableFormat,
    group: int,
    scale: Scale,
    *,
    transposed: bool = False,
    half: bool = False,
) -> dict[str, ir.TensorProtocol]:
    """Return ``codes``, ``scales`` and, where the format has them, ``zero_points`` of a matrix; nothing is read.

    Codes and zero points have the type that ONNX has for the format, or uint8 where it has none. Scales have the
    matrix's own type, as ``DequantizeLinear`` wants it, also where they are rounded to float16.

    Args:
        weight: a tensor [rows, columns]; groups run along the rows.
        table: the format.
        group: rows that share a scale; the last group may have fewer.
        scale: how scales are chosen, see :func:`graphopt.rounding.round_to_nearest`.
        transposed: groups run along the columns instead, as a table that is looked up by row wants it.
        half: round scales to float16 if all of them are normal numbers there.
    """
    source, standard = expression_of(weight), table.onnx_type is not None
    rounding = RoundedToNearest(source, table, group, scale, axis=int(transposed), half=half, standard=standard)
    return {name: WeightTensor(part) for name, part in parts_of(rounding).items()}


class LazyQuantized:
    """As :func:`quantized`, for graphs that state the type of scales: who asks for it reads the weight once.

    Args:
        weight: an initializer, [rows, columns].
        table: as for :func:`quantized`.
        group: as for :func:`quantized`.
        scale: as for :func:`quantized`.
        transposed: as for :func:`quantized`.
        half: as for :func:`quantized`.
    """

    def __init__(
        self,
        weight: ir.Value,
        table: TableFormat,
        group: int,
        scale: Scale,
        *,
        transposed: bool = False,
        half: bool = False,
    ) -> None:
        self._source, self._table, self._group, self._scale = expression_of(weight.const_value), table, group, scale
        self._transposed, self._half = transposed, half

    @cached_property
    def half(self) -> bool:
        """Whether scales are rounded to float16. This reads the weight; :meth:`tensors` does not."""
        if not self._half:
            return False
        matrix = self._source.numpy()
        return fits_half(matrix.T if self._transposed else matrix, self._table, self._group)

    def tensors(self) -> dict[str, ir.TensorProtocol]:
        """Return ``codes``, ``scales`` and, where the format has them, ``zero_points``, not yet evaluated.

        Raises:
            ValueError: ONNX has no type for the format.
        """
        return {name: WeightTensor(part) for name, part in parts_of(self._rounding(standard=True)).items()}

    def places(self) -> dict[str, ir.TensorProtocol]:
        """Return the same for any format: codes are places in its table, uint8, zero points are values of it.

        Scales and zero points are float16 where :attr:`half` is true, else of the matrix's own type.
        """
        parts: dict[str, Expression] = {**parts_of(self._rounding(standard=False))}
        dtype = ir.DataType.FLOAT16 if self.half else parts["scales"].dtype
        for name in parts.keys() - {"codes"}:  # a code that means 0 is its own value
            parts[name] = parts[name] if parts[name].dtype == dtype else Cast(parts[name], dtype)
        return {name: WeightTensor(part) for name, part in parts.items()}

    def _rounding(self, *, standard: bool) -> RoundedToNearest:
        axis = int(self._transposed)
        return RoundedToNearest(
            self._source, self._table, self._group, self._scale, axis=axis, half=self._half, standard=standard
        )
