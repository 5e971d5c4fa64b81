"""A node between a value and those that read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Collection

    from graphopt.graph.editing.builders import Dims


def insert_behind(
    value: ir.Value, node: ir.Node, readers: Collection[ir.Node] | None = None, renamed: str | None = None
) -> ir.Value:
    """Put ``node``, which reads ``value``, between it and those that read it; return what they read now.

    Args:
        value: what is read.
        node: a new node; its output gets the type and shape of ``value`` where it has none.
        readers: the nodes that are to read the output of ``node``; ``None`` for all nodes.
        renamed: a new name for ``value``: the output of ``node`` then takes its old one, and its place among the
            outputs of the graph. Without it the output is called ``<name of node>.output``, and ``value`` stays the
            output of the graph that it may be.
    """
    made, producer = node.outputs[0], value.producer()
    uses = [use for use in value.uses() if use.node is not node and (readers is None or use.node in readers)]
    if producer is not None and producer.graph is not None:
        producer.graph.insert_after(producer, node)
    else:
        graph = uses[0].node.graph
        assert graph is not None
        graph.insert_before(min((use.node for use in uses), key=list(graph).index), node)
    name_output(node, value)
    if renamed is not None:
        name = value.name
        value.replace_all_uses_with(made, replace_graph_outputs=True)
        for index, each in enumerate(node.inputs):
            if each is made:
                node.replace_input_with(index, value)
        value.name, made.name = renamed, name
    for use in uses:
        use.node.replace_input_with(use.idx, made)
    return made


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
    node: ir.Node, like: ir.Value, dims: Dims | None = None, dtype: ir.DataType | None = None, name: str | None = None
) -> ir.Value:
    """Return the first output of ``node``, with a name, and with a type and a shape where it has none.

    Args:
        node: a new node.
        like: a value that has the type and the shape.
        dims: another shape.
        dtype: another type.
        name: the name, if not ``<name of node>.output``.
    """
    made = node.outputs[0]
    made.name = name or f"{node.name}.output"
    if made.type is None:
        made.type = like.type if dtype is None else ir.TensorType(dtype)
    if made.shape is None:
        made.shape = like.shape if dims is None else ir.Shape(list(dims))
    return made
