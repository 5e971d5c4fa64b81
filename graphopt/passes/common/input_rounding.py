"""What products round their inputs to: a node in front of them, one for all that read the same tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphopt.analysis.structure.product_codes import rounding_of
from graphopt.graph.diagnostics import Rule
from graphopt.graph.editing import drop
from graphopt.runtime_ops import DOMAIN
from graphopt.runtime_ops.round_activations.spec.op import ROUND_ACTIVATIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx_ir as ir

    from graphopt.passes.context import Ledger

ROUNDING = Rule(
    "inputs.rounded",
    "{input} rounded to {activations}",
    group=" in groups of {group}",
    per_token=" per token",
    cut_off=", the largest {cut_off:.3g} of its range cut off",
)


# What stands in a value's metadata where 4 bits are too few for it.
_SPARE_PROPERTY = "ai.graphopt.spared"


def spare(x: ir.Value) -> None:
    """Note that ``x`` is to keep 8 bits where inputs of products are rounded to 4."""
    x.metadata_props[_SPARE_PROPERTY] = "8 bits"


def is_spared(x: ir.Value) -> bool:
    """Return whether ``x`` is to keep 8 bits."""
    return _SPARE_PROPERTY in x.metadata_props


def forget_spared(graph: ir.Graph) -> None:
    """Take the notes of :func:`spare` away."""
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        value.metadata_props.pop(_SPARE_PROPERTY, None)


def input_of(node: ir.Node) -> ir.Value:
    """Return what the product ``node`` reads, before it is rounded."""
    x = (rounding_of(node) or node).inputs[0]
    assert x is not None
    return x


def round_input(graph: ir.Graph, node: ir.Node, attributes: Mapping[str, Any], ledger: Ledger) -> None:
    """Let the product ``node`` read its input through ``RoundActivations``; a rounding that it had is replaced."""
    x, old = input_of(node), node.inputs[0]
    rounding = next((use.node for use in x.uses() if _is_rounding(use.node, attributes)), None)
    if rounding is None:
        group, clip = attributes["group"], attributes["clip"]
        name = f"{x.name}.{attributes['activations']}.{group or 'token'}"
        rounding = ROUND_ACTIVATIONS.node([x], dict(attributes), name=name)
        output = rounding.outputs[0]
        output.name, output.type, output.shape = f"{name}.output", x.type, x.shape
        producer = x.producer()
        if producer is None:
            graph.insert_before(graph[0], rounding)
        else:
            graph.insert_after(producer, rounding)
        figures = {"group": group, "per_token": not group, "cut_off": 1 - clip}
        ledger.changed(rounding, ROUNDING(input=x.name, activations=attributes["activations"], **figures), [node])
    node.replace_input_with(0, rounding.outputs[0])
    if old is not None and old is not x:
        drop(graph, old)


def _is_rounding(node: ir.Node, attributes: Mapping[str, Any]) -> bool:
    return (node.domain, node.op_type) == (DOMAIN, ROUND_ACTIVATIONS.name) and all(
        node.attributes[name].value == value for name, value in attributes.items()
    )
