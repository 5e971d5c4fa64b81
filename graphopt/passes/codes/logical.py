"""The logical form of stored codes that ONNX has no type for: one node in front of the product."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphopt.analysis.codes import DEQUANTIZE
from graphopt.editing import shared


def dequantize(
    graph: ir.Graph,
    product: ir.Node,
    codes: ir.Value,
    scales: ir.Value,
    table: ir.Value,
    zero_points: ir.Value | None,
    group: int,
) -> ir.Node:
    """Return a ``Dequantize`` for the right side of ``product``, to be put in front of it.

    Args:
        graph: the graph; it gets the placeholder of absent zero points.
        product: what is to read it.
        codes: [K, N].
        scales: [groups, N].
        table: the value of each code.
        zero_points: [groups, N], in the type of ``scales``; ``None`` for none.
        group: rows that share a scale.
    """
    if zero_points is None:
        assert scales.dtype is not None
        zero_points = shared(graph, f"zero.{scales.dtype.name.lower()}", np.zeros((1, 1), scales.dtype.numpy()))
    inputs = {"codes": codes, "scales": scales, "table": table, "zero_points": zero_points}
    return DEQUANTIZE.node(inputs, {"group": group}, name=f"{product.name}.dequantize")


def typed(value: ir.Value, name: str | None, dtype: ir.DataType | None, shape: Sequence[int | ir.SymbolicDim]) -> None:
    """Give a new value its name, type and shape."""
    value.name, value.shape = name, ir.Shape(shape)
    value.type = None if dtype is None else ir.TensorType(dtype)
