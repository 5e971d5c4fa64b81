"""Codes, scales and zero points of a product in the layout of our operators, packed when they are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.product_codes import StoredCodes, feeds_lookups
from graphopt.graph.editing import shared_constant
from graphopt.graph.weights import Expression, WeightTensor, expression_of, new_weight
from graphopt.numerics.formats import Format
from graphopt.passes.common.table_layout import PackCodes, TileScales
from graphopt.quantization.rounding.expressions import CodeIndices

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphopt.runtime_ops import Operator

_PORTS = ("codes", "scales", "table", "zero_points", "bias")


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix as ``MatMulTable`` takes it.

    Attributes:
        inputs: codes, scales, table, zero points and bias.
        attributes: rows and columns of the matrix, rows that share a scale, and whether zero points are minimums or
            codes those of a trellis.
    """

    inputs: tuple[ir.Value, ...]
    attributes: Mapping[str, int]

    @property
    def ports(self) -> dict[str, ir.Value]:
        """The inputs by the names of their ports."""
        return dict(zip(_PORTS, self.inputs, strict=True))

    @property
    def wide(self) -> bool:
        """Whether scales are float32, since float16 does not hold all of them."""
        return self.inputs[1].dtype == ir.DataType.FLOAT

    def node(
        self, operator: Operator, x: ir.Value, extra: tuple[ir.Value, ...], attributes: Mapping[str, Any], name: str
    ) -> ir.Node:
        """Return a node of ``operator`` on ``x`` and this matrix."""
        return operator.node([x, *self.inputs, *extra], {**self.attributes, **attributes}, name=name)


def pack_matrix(graph: ir.Graph, codes: StoredCodes) -> PackedMatrix:
    """Return ``codes`` as initializers in our layout; bias and absent zero points are placeholders that nodes share.

    The numbers stay what they are: float32 scales become float16 only where each of them, and each zero point that is a
    number, is one. What only ``codes`` reads leaves the graph, and packed tensors of our own form take over its names.
    """
    half = codes.scales.dtype == ir.DataType.FLOAT16 or all(map(_all_half, _numbers(codes)))
    tensors = packed_tensors(codes, ir.DataType.FLOAT16 if half else ir.DataType.FLOAT)
    values = {"codes": codes.codes, "scales": codes.scales, "zero_points": codes.zero_points}
    names = {part: _name(value, part, codes) for part, value in values.items() if value is not None}
    products = sum(not feeds_lookups(use.node) for use in codes.reader.outputs[0].uses())
    for value in values.values():
        if value is not None and len(value.uses()) == 1 and products <= 1:
            del graph.initializers[value.name or ""]
    parts = {part: new_weight(graph, names[part], tensor) for part, tensor in tensors.items()}
    scales = parts["scales"]
    assert scales.dtype is not None
    placeholder = np.zeros((1, 1, 1), scales.dtype.numpy())
    table = codes.table
    inputs = (
        parts["codes"],
        scales,
        shared_constant(graph, f"{table.name}.table", codes.values) if isinstance(table, Format) else table,
        parts.get("zero_points") or shared_constant(graph, f"no_zero_points.{scales.dtype.name.lower()}", placeholder),
        shared_constant(graph, "no_bias", np.zeros(1, np.float32)),
    )
    rows, columns = codes.shape
    sizes = {"rows": rows, "columns": columns, "group": codes.group}
    flags = {"minimums": codes.minimums, "trellis": codes.is_trellis}
    return PackedMatrix(inputs, sizes | {name: 1 for name, flag in flags.items() if flag})


def packed_tensors(matrix_codes: StoredCodes, dtype: ir.DataType) -> dict[str, ir.TensorProtocol]:
    """Return ``codes``, ``scales`` and, where there are any, ``zero_points`` in our layout, none of them evaluated.

    Args:
        matrix_codes: what is packed.
        dtype: type of scales and zero points, which must hold each of them exactly.
    """
    bits = matrix_codes.bits
    codes, scales = (expression_of(value.const_value) for value in (matrix_codes.codes, matrix_codes.scales))
    parts: dict[str, Expression] = {
        "codes": PackCodes(CodeIndices(codes, bits), bits),
        "scales": TileScales(scales, dtype),
    }
    if matrix_codes.zero_points is not None:
        points = expression_of(matrix_codes.zero_points.const_value)
        table = matrix_codes.table if isinstance(matrix_codes.table, Format) else None
        parts["zero_points"] = TileScales(points if table is None else CodeIndices(points, bits), dtype, table)
    return {name: WeightTensor(part) for name, part in parts.items()}


def _name(value: ir.Value, part: str, codes: StoredCodes) -> str:
    name = value.name or part
    head, separator, tail = name.rpartition(f".{part}")
    return f"{head}.packed{separator}{tail}" if codes.is_standard else name


def _numbers(codes: StoredCodes) -> list[ir.Value]:
    """Return scales, and zero points where they are not codes: one type must hold them all."""
    points = None if isinstance(codes.table, Format) else codes.zero_points
    return [codes.scales] if points is None else [codes.scales, points]


def _all_half(scales: ir.Value) -> bool:
    assert scales.const_value is not None
    numbers = np.asarray(scales.const_value.numpy())
    with np.errstate(over="ignore"):
        return bool(np.array_equal(numbers.astype(np.float16).astype(numbers.dtype), numbers))
