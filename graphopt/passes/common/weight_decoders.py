"""A weight as codes, and the node that decodes it in the graph and in each branch that reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import onnx_ir as ir

from graphopt.graph.editing import drop
from graphopt.graph.weights import new_weight

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class StoredWeight(NamedTuple):
    """A weight as codes.

    Attributes:
        values: codes and scales.
        attributes: of the node that decodes them.
        decoders: that node, in the graph and in each branch that reads the weight.
    """

    values: list[ir.Value]
    attributes: dict[str, Any]
    decoders: dict[ir.Graph | ir.Function, ir.Node]

    def serve(self, node: ir.Node, index: int) -> ir.Node:
        """Let ``node`` read what the codes mean as its input ``index``; return the node that decodes them there."""
        assert node.graph is not None
        if node.graph in self.decoders:
            node.replace_input_with(index, self.decoders[node.graph].outputs[0])
        else:
            decoder = self.decoders[node.graph] = decode(node, index, self.values, self.attributes)
            if len(self.decoders) > 1:  # names are unique in nested branches too
                decoder.outputs[0].name = f"{decoder.outputs[0].name}.{len(self.decoders)}"
        return self.decoders[node.graph]


def decode(node: ir.Node, index: int, values: Sequence[ir.Value], attributes: Mapping[str, Any]) -> ir.Node:
    """Let ``node`` read what codes mean as its input ``index``; return the new node that decodes them."""
    before = node.inputs[index]
    assert before is not None and node.graph is not None
    decoder = ir.node("DequantizeLinear", values, attributes, name=f"{node.name}.dequantize.{index}")
    output = decoder.outputs[0]
    output.name, output.type, output.shape = f"{values[0].name}.dequantized", before.type, before.shape
    node.graph.insert_before(node, decoder)
    node.replace_input_with(index, output)
    return decoder


def lift_weight(graph: ir.Graph, value: ir.Value | None) -> ir.Value | None:
    """Return the initializer of ``graph`` that holds ``value``, a constant of the graph or of a branch.

    A constant of a branch moves out of it; ``None`` where ``value`` is computed.
    """
    if value is None or value.is_graph_input():
        return None
    producer, tensor, owner = value.producer(), value.const_value, value.graph
    if producer is not None:
        attribute = producer.attributes.get("value") if producer.op_type == "Constant" else None
        tensor, owner = None if attribute is None else attribute.as_tensor(), producer.graph
    elif not value.is_initializer() or value.name in graph.initializers:
        return value if value.is_initializer() else None
    if tensor is None or value.is_graph_output() or owner is None:
        return None
    weight = new_weight(graph, f"{value.name}.of_branch", tensor)
    value.replace_all_uses_with(weight)
    drop(owner, value)
    return weight
