"""Nodes put in place of others, with names, types and shapes: what the lifts of whole operators share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphopt.passes.lower.products import shared

Dims = Sequence[int | str | ir.SymbolicDim | None]


class Inserter:
    """Makes nodes of standard ONNX in front of ``before``, named after ``stem``.

    Args:
        graph: the graph.
        before: the node that reads them.
        stem: what their names begin with.
    """

    def __init__(self, graph: ir.Graph, before: ir.Node, stem: str) -> None:
        self.graph, self._before, self._stem = graph, before, stem
        self.nodes: list[ir.Node] = []

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        dims: Dims,
        dtype: ir.DataType | None,
        suffix: str = "",
        **attributes: object,
    ) -> ir.Value:
        """Return the first output of a new node, of shape ``dims`` and type ``dtype``."""
        return self.node(op_type, inputs, [(dims, dtype)], suffix, **attributes).outputs[0]

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[tuple[Dims, ir.DataType | None]],
        suffix: str = "",
        **attributes: object,
    ) -> ir.Node:
        """Return a new node with outputs of these shapes and types."""
        node = ir.node(op_type, inputs, attributes, num_outputs=len(outputs), name=f"{self._stem}.{suffix or op_type}")  # type: ignore[arg-type]
        for number, (value, (dims, dtype)) in enumerate(zip(node.outputs, outputs, strict=True)):
            value.name = f"{node.name}.output{number or ''}"
            value.shape = ir.Shape(list(dims))
            if dtype is not None:
                value.dtype = dtype
        self.graph.insert_before(self._before, node)
        self.nodes.append(node)
        return node

    def integers(self, numbers: Sequence[int] | int) -> ir.Value:
        """Return a constant, one for all who ask for the same numbers."""
        return shared(self.graph, f"integers.{numbers}".replace(" ", ""), np.array(numbers, np.int64))

    def apart(self, rows: ir.Value, heads: int, size: int, suffix: str = "heads") -> ir.Value:
        """Return rows [batch, length, heads x size] as [batch, length, heads, size]."""
        assert rows.shape is not None
        target = self.integers([0, 0, heads, size])
        return self.op("Reshape", [rows, target], [*rows.shape[:2], heads, size], rows.dtype, suffix)

    def turned(self, value: ir.Value, suffix: str = "turned") -> ir.Value:
        """Return [batch, a, b, size] as [batch, b, a, size]."""
        assert value.shape is not None
        batch, first, second, size = value.shape
        return self.op("Transpose", [value], [batch, second, first, size], value.dtype, suffix, perm=[0, 2, 1, 3])


def take_place(old: ir.Value, new: ir.Value) -> None:
    """Let ``new`` be read wherever ``old`` was, under its name; it keeps what it knows of its own shape."""
    name = old.name
    new.type = new.type or old.type
    new.shape = new.shape or old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name, new.name = f"{name}.replaced", name
