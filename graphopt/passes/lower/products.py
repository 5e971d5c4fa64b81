"""Products by packed codes: what the passes that make them share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt import editing
from graphopt.editing import shared
from graphopt.formats.table import TableFormat
from graphopt.passes.context import Ledger
from graphopt.rounding.packed import format_of_codes, repacked_tensors
from graphopt.runtime_ops import Operator
from graphopt.weights import new_weight, weight_of

HALF = "graphopt.half"
"""Metadata of float32 scales that were rounded to float16, so that they can be stored as such without reading them."""


@dataclass(frozen=True)
class Packed:
    """A matrix as ``MatMulTable`` takes it.

    Attributes:
        inputs: codes, scales, table, zero points and bias.
        rows: rows of the matrix.
        columns: columns of the matrix.
        group: rows that share a scale.
    """

    inputs: tuple[ir.Value, ...]
    rows: int
    columns: int
    group: int

    @classmethod
    def of_node(cls, node: ir.Node) -> Packed:
        """Return what a node of one of our products reads."""
        inputs = tuple(value for value in node.inputs[1:6] if value is not None)
        return cls(inputs, *(node.attributes.get_int(name, 0) for name in ("rows", "columns", "group")))

    def node(
        self, operator: Operator, x: ir.Value, more: tuple[ir.Value, ...], attributes: Mapping[str, Any], name: str
    ) -> ir.Node:
        """Return a node of ``operator`` on ``x`` and this matrix."""
        sizes = {"rows": self.rows, "columns": self.columns, "group": self.group}
        return operator.node([x, *self.inputs, *more], {**sizes, **attributes}, name=name)


def pack(
    graph: ir.Graph,
    name: str,
    table: TableFormat,
    shape: tuple[int, int],
    group: int,
    tensors: Mapping[str, ir.TensorProtocol],
) -> Packed:
    """Register packed tensors as initializers called after ``name``; the table and what is neutral are shared."""
    parts = {part: new_weight(graph, f"{name}.{part}", tensor) for part, tensor in tensors.items()}
    scales = parts["scales"]
    assert scales.dtype is not None
    neutral = np.zeros((1, 1, 1), scales.dtype.numpy())
    inputs = (
        parts["codes"],
        scales,
        shared(graph, f"{table.name}.table", table.values.astype(np.float32)),
        parts.get("zero_points") or shared(graph, f"no_zero_points.{scales.dtype.name.lower()}", neutral),
        shared(graph, "no_bias", np.zeros(1, np.float32)),
    )
    return Packed(inputs, *shape, group)


def repack(graph: ir.Graph, dequantize: ir.Node) -> Packed | str:
    """Return the codes that ``dequantize`` reads as initializers in our layout, or why that cannot be.

    The numbers stay what they are: scales become float16 only where each is one.
    """
    codes, scales = weight_of(dequantize, 0), weight_of(dequantize, 1)
    if codes is None or codes.dtype is None or scales is None or codes.const_value is None:
        return "its codes or scales are no constants"
    if len(dequantize.inputs) > 2 and dequantize.inputs[2] is not None and weight_of(dequantize, 2) is None:
        return "its zero points are no constants"
    table = format_of_codes(codes.dtype)
    if table is None:
        return f"codes of {codes.dtype.name} have no table"
    shape = codes.const_value.shape.numpy()
    group = dequantize.attributes.get_int("block_size", 0)
    if len(shape) != 2 or dequantize.attributes.get_int("axis", 1) % 2 != 0 or group < 1:
        return "its scales are not in groups of rows"
    if group % 16 and group != shape[0]:
        return f"its groups have {group} rows, which is no multiple of 16"
    if scales.dtype != ir.DataType.FLOAT:
        return "its scales are not float32"
    dtype = ir.DataType.FLOAT16 if _all_half(scales) else ir.DataType.FLOAT
    name = (codes.name or "").removesuffix(".codes") + ".packed"
    return pack(graph, name, table, (shape[0], shape[1]), group, repacked_tensors(dequantize, dtype))


def _all_half(scales: ir.Value) -> bool:
    if HALF in scales.metadata_props:
        return True
    assert scales.const_value is not None
    numbers = np.asarray(scales.const_value.numpy())
    with np.errstate(over="ignore"):
        return bool(np.array_equal(numbers.astype(np.float16).astype(numbers.dtype), numbers))


def replace(
    graph: ir.Graph, node: ir.Node, new: ir.Node, what: str, ledger: Ledger, *, sources: tuple[ir.Value, ...] = ()
) -> None:
    """Let ``new`` take the place and the output name of ``node``; remove what nothing reads any more."""
    editing.replace(node, new)
    ledger.changed(new, what, [node, *sources])
