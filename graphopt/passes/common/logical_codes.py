"""The logical form of stored codes: one node in front of the product, and of the lookups that share its codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.editing import name_output, shared_constant
from graphopt.runtime_ops import OPERATORS
from graphopt.runtime_ops.dequantize.spec.op import DEQUANTIZE
from graphopt.runtime_ops.dequantize_trellis.spec.op import DEQUANTIZE_TRELLIS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.numerics.formats import Format


def dequantize(
    graph: ir.Graph,
    product: ir.Node,
    codes: ir.Value,
    scales: ir.Value,
    meaning: Format | ir.Value | tuple[ir.Value, int],
    zero_points: ir.Value | None,
    group: int,
    *,
    minimums: bool = False,
) -> ir.Node:
    """Return the node that makes the right side of ``product`` of codes, to be put in front of it.

    Args:
        graph: the graph; it gets the placeholder of absent zero points.
        product: what is to read it.
        codes: [K, N].
        scales: [groups, N].
        meaning: the format, or the value of each code, or the tables of a trellis and the bits of its codes.
        zero_points: [groups, N], in the type of ``scales``; ``None`` for none.
        group: rows that share a scale.
        minimums: whether zero points are minimums, added behind the scales.
    """
    attributes = {"group": group, **({"minimums": 1} if minimums else {})}
    if isinstance(meaning, tuple):
        operator, operands, bits = DEQUANTIZE_TRELLIS, {"tables": meaning[0]}, meaning[1]
    elif isinstance(meaning, ir.Value):
        operator, operands, bits = DEQUANTIZE, {"table": meaning}, 0
    else:
        operator, operands, bits = OPERATORS[meaning.operator], _operands(graph, meaning), meaning.bits
    if "bits" in operator.schema.attributes:
        attributes["bits"] = bits
    if "zero_points" in operator.schema.input_names:
        operands["zero_points"] = zero_points or _no_zero_points(graph, scales)
    inputs: dict[str, ir.Value | None] = {"codes": codes, "scales": scales, **operands}
    return operator.node(inputs, attributes, name=f"{product.name}.dequantize")


def _operands(graph: ir.Graph, format: Format) -> dict[str, ir.Value]:
    return {port: shared_constant(graph, f"{format.name}.{port}", array) for port, array in format.operands.items()}


def _no_zero_points(graph: ir.Graph, scales: ir.Value) -> ir.Value:
    assert scales.dtype is not None
    return shared_constant(graph, f"zero.{scales.dtype.name.lower()}", np.zeros((1, 1), scales.dtype.numpy()))


def set_type(
    value: ir.Value, name: str | None, dtype: ir.DataType | None, shape: Sequence[int | ir.SymbolicDim]
) -> None:
    """Give a new value its name, type and shape."""
    value.name, value.shape = name, ir.Shape(shape)
    value.type = None if dtype is None else ir.TensorType(dtype)


def columns_of(graph: ir.Graph, reader: ir.Node, lookup: ir.Node) -> ir.Value:
    """Return the matrix that ``reader`` makes, transposed in front of ``lookup``, which is to read its rows."""
    nodes, matrix = list(graph), reader.outputs[0]
    assert matrix.shape is not None
    if nodes.index(reader) > nodes.index(lookup):
        graph.remove(reader)
        graph.insert_before(lookup, reader)
    transpose = ir.node("Transpose", [matrix], {"perm": [1, 0]}, name=f"{lookup.name}.columns")
    graph.insert_before(lookup, transpose)
    return name_output(transpose, matrix, dims=list(reversed(matrix.shape)))
