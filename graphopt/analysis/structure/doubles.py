"""What a graph stores and computes in float64."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.analysis.structure.cast_circles import cast_circles


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
