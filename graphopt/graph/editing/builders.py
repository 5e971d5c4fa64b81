"""New nodes and constants, with names, types and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.graph.weights import new_weight

Dims = Sequence[int | str | ir.SymbolicDim | None] | ir.Shape
"""Dimensions of a value: numbers, names, or ``None`` where one is unknown."""


def clone_node(node: ir.Node, inputs: Sequence[ir.Value | None], name: str | None = None) -> ir.Node:
    """Return a node that does to ``inputs`` what ``node`` does to its own, with its attributes and its history."""
    copy = ir.node(
        node.op_type,
        inputs,
        domain=node.domain,
        overload=node.overload,
        version=node.version,
        num_outputs=len(node.outputs),
        name=node.name if name is None else name,
    )
    copy.attributes.update(node.attributes)
    copy.metadata_props.update(node.metadata_props)
    return copy


def shared_constant(graph: ir.Graph, name: str, array: npt.NDArray[Any]) -> ir.Value:
    """Return the initializer ``name`` that holds ``array``, made unless it is there."""
    constant = graph.initializers.get(name)
    if constant is not None and constant.const_value is not None and _equal(constant.const_value.numpy(), array):
        return constant
    return new_weight(graph, name, ir.tensor(array, name=name))


def _equal(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    return a.dtype == b.dtype and bool(np.array_equal(a, b))


def free_name(graph: ir.Graph, name: str) -> str:
    """Return ``name``, or with a number behind it, as no node of ``graph`` is called yet."""
    names = {node.name for node in graph}
    unique, number = name, 1
    while unique in names:
        unique, number = f"{name}.{number}", number + 1
    return unique


class Inserter:
    """Makes nodes of standard ONNX in front of ``before``, named after ``stem``.

    Args:
        graph: the graph.
        before: the node that reads them.
        stem: what their names begin with.
    """

    def __init__(self, graph: ir.Graph, before: ir.Node, stem: str) -> None:
        self.graph, self.before, self._stem = graph, before, stem
        self.nodes: list[ir.Node] = []

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        dims: Dims | None,
        dtype: ir.DataType | None,
        suffix: str = "",
        **attributes: object,
    ) -> ir.Value:
        """Return the first output of a new node, of shape ``dims`` and type ``dtype``; ``None`` where unknown."""
        return self.node(op_type, inputs, [(dims, dtype)], suffix, **attributes).outputs[0]

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[tuple[Dims | None, ir.DataType | None]],
        suffix: str = "",
        **attributes: object,
    ) -> ir.Node:
        """Return a new node with outputs of these shapes and types."""
        node = ir.node(op_type, inputs, attributes, num_outputs=len(outputs), name=f"{self._stem}.{suffix or op_type}")  # type: ignore[arg-type]
        for number, (value, (dims, dtype)) in enumerate(zip(node.outputs, outputs, strict=True)):
            value.name = f"{node.name}.output{number or ''}"
            if dims is not None:
                value.shape = ir.Shape(list(dims))
            if dtype is not None:
                value.dtype = dtype
        self.graph.insert_before(self.before, node)
        self.nodes.append(node)
        return node

    def integers(self, numbers: Sequence[int] | int) -> ir.Value:
        """Return a constant, the same one for equal numbers."""
        return shared_constant(self.graph, f"integers.{numbers}".replace(" ", ""), np.array(numbers, np.int64))
