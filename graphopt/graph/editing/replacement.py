"""Nodes in place of others; what nothing reads any more goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def take_place(old: ir.Value, new: ir.Value) -> None:
    """Let ``new`` be read wherever ``old`` was, under its name; its own type and shape stay where it has them.

    Outputs of the graph count as readers. ``old`` is left without any, under the name ``<name>.replaced``.
    """
    name = old.name
    new.type = old.type if new.type is None else new.type
    new.shape = old.shape if new.shape is None else new.shape
    new.metadata_props.update({key: text for key, text in old.metadata_props.items() if key not in new.metadata_props})
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name, new.name = f"{name}.replaced", name


def replace(
    node: ir.Node, new: ir.Node | Sequence[ir.Node], outputs: Mapping[ir.Value, ir.Value] | None = None
) -> None:
    """Put ``new`` where ``node`` stands, and remove ``node`` with all that nothing else reads.

    Args:
        node: a node of a graph.
        new: what comes instead, in order; nodes that are in the graph already stay where they are. Each carries the
            history of ``node`` on.
        outputs: which value takes the place of which; the outputs of the last of ``new`` by default, one by one. An
            output of ``node`` that is left out must have no readers.
    """
    graph, nodes = node.graph, [new] if isinstance(new, ir.Node) else list(new)
    assert graph is not None
    graph.insert_before(node, [successor for successor in nodes if successor.graph is None])
    if outputs is None:
        outputs = dict(zip(node.outputs, nodes[-1].outputs, strict=False))
    for old, substitute in outputs.items():
        take_place(old, substitute)
    for successor in nodes:
        inherit(successor, node)
    remove(node)


def bypass(node: ir.Node, value: ir.Value) -> None:
    """Let the readers of what ``node`` makes read ``value`` instead, which keeps its name, and remove ``node``.

    The output of ``node`` must not be an output of the graph, which would lose its name.
    """
    node.outputs[0].replace_all_uses_with(value)
    remove(node)


def inherit(node: ir.Node, old: ir.Node) -> None:
    """Let ``node`` carry on what ``old`` says about where it came from; what it says itself stays."""
    node.metadata_props.update(
        {key: text for key, text in old.metadata_props.items() if key not in node.metadata_props}
    )


def remove(node: ir.Node) -> None:
    """Remove a node that nothing reads, and with it all that nothing else reads."""
    graph, operands = node.graph, [value for value in node.inputs if value is not None]
    assert graph is not None
    graph.remove(node, safe=True)
    for value in operands:
        drop(graph, value)


def drop(graph: ir.Graph | ir.Function, value: ir.Value) -> None:
    """Remove what makes ``value``, a node or an initializer, if nothing reads it, and so on with what that read."""
    producer = value.producer()
    siblings = [value] if producer is None else producer.outputs
    if any(sibling.uses() or sibling.is_graph_output() or sibling.is_graph_input() for sibling in siblings):
        return
    if producer is None and isinstance(graph, ir.Graph) and value.is_initializer():
        graph.initializers.pop(value.name or "", None)
    elif producer is not None and producer.graph is graph:
        remove(producer)
