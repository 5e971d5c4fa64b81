"""A node between a value and those that read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Collection

    from graphopt.graph.editing.builders import Dims


def insert_behind(
    value: ir.Value, node: ir.Node, readers: Collection[ir.Node] | None = None, value_name: str | None = None
) -> ir.Value:
    """Put ``node``, which reads ``value``, between it and those that read it; return what they read now.

    Args:
        value: what is read.
        node: a new node; its output gets the type and shape of ``value`` where it has none.
        readers: the nodes that are to read the output of ``node``; ``None`` for all nodes.
        value_name: a new name for ``value``: the output of ``node`` then takes its old one, and its place among the
            outputs of the graph. Without it the output is called ``<name of node>.output``, and ``value`` stays the
            output of the graph that it may be.
    """
    output, producer = node.outputs[0], value.producer()
    uses = [use for use in value.uses() if use.node is not node and (readers is None or use.node in readers)]
    if producer is not None and producer.graph is not None:
        producer.graph.insert_after(producer, node)
    else:
        _insert_before_first([use.node for use in uses], node)
    name_output(node, value)
    if value_name is not None:
        name = value.name
        value.replace_all_uses_with(output, replace_graph_outputs=True)
        for index, operand in enumerate(node.inputs):
            if operand is output:
                node.replace_input_with(index, value)
        value.name, output.name = value_name, name
    for use in uses:
        use.node.replace_input_with(use.idx, output)
    return output


def _insert_before_first(readers: list[ir.Node], node: ir.Node) -> None:
    graph = readers[0].graph
    assert graph is not None
    graph.insert_before(min(readers, key=list(graph).index), node)


def insert_in_front(reader: ir.Node, index: int, node: ir.Node) -> ir.Value:
    """Put ``node`` in front of input ``index`` of ``reader``, which then reads its output; return that."""
    graph, value = reader.graph, reader.inputs[index]
    assert graph is not None
    if value is not None:
        name_output(node, value)
    graph.insert_before(reader, node)
    reader.replace_input_with(index, node.outputs[0])
    return node.outputs[0]


def name_output(
    node: ir.Node,
    template: ir.Value,
    dims: Dims | None = None,
    dtype: ir.DataType | None = None,
    name: str | None = None,
) -> ir.Value:
    """Return the first output of ``node``, with a name, and with a type and a shape where it has none.

    Args:
        node: a new node.
        template: a value that has the type and the shape.
        dims: another shape.
        dtype: another type.
        name: the name, if not ``<name of node>.output``.
    """
    output = node.outputs[0]
    output.name = name or f"{node.name}.output"
    if output.type is None:
        output.type = template.type if dtype is None else ir.TensorType(dtype)
    if output.shape is None:
        output.shape = template.shape if dims is None else ir.Shape(list(dims))
    return output
