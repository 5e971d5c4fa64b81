"""What a graph stores and computes in float64."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.analysis.structure.cast_circles import cast_circles
from graphopt.analysis.structure.value_types import type_of


def double_weights(model: ir.Model) -> list[ir.Value]:
    """Return the constants of float64, those in subgraphs too."""
    return [
        value
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None and value.const_value.dtype == ir.DataType.DOUBLE
    ]


def double_casts(model: ir.Model) -> list[ir.Node]:
    """Return the nodes that cast to float64, those in subgraphs too, but not those whose result is cast back."""
    back = {value for node in cast_circles(model.graph) for value in node.inputs}
    return [
        node
        for node in model.graph.all_nodes()
        if (node.domain, node.op_type) == ("", "Cast")
        and node.attributes.get_int("to", 0) == int(ir.DataType.DOUBLE)
        and node.outputs[0] not in back
    ]


def double_attributes(model: ir.Model) -> list[tuple[ir.Node, str]]:
    """Return the attributes by which nodes make float64, those in subgraphs too: tensors, and ``dtype``; no casts."""
    return [
        (node, name)
        for node in model.graph.all_nodes()
        for name, attribute in node.attributes.items()
        if (attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == ir.DataType.DOUBLE)
        or (name == "dtype" and attribute.type == ir.AttributeType.INT and attribute.as_int() == ir.DataType.DOUBLE)
    ]


def double_to_integers(model: ir.Model) -> list[ir.Node]:
    """Return the nodes that cast numbers of float64 to integers, those in subgraphs too."""
    return [
        node
        for node in model.graph.all_nodes()
        if (node.domain, node.op_type) == ("", "Cast")
        and ir.DataType(node.attributes.get_int("to", 1)).is_integer()
        and node.inputs[0] is not None
        and type_of(node.inputs[0]) == ir.DataType.DOUBLE
    ]
