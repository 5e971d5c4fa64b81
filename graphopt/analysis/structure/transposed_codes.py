"""Codes that are transposed between their decoding and the product that reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.graph.weights import weight_of

if TYPE_CHECKING:
    import onnx_ir as ir


def transposed_codes(graph: ir.Graph) -> list[ir.Node]:
    """Return each ``Transpose`` of two axes between a ``DequantizeLinear`` of stored codes and products."""
    return [
        node
        for node in graph
        if (node.domain, node.op_type) == ("", "Transpose")
        and (reader := node.inputs[0].producer() if node.inputs[0] is not None else None) is not None
        and (reader.domain, reader.op_type) == ("", "DequantizeLinear")
        and (codes := weight_of(reader, 0)) is not None
        and codes.const_value is not None
        and len(codes.const_value.shape) == 2
        and [*node.attributes.get_ints("perm", (1, 0))] == [1, 0]
        and any(use.node.op_type == "MatMul" and use.idx == 1 for use in node.outputs[0].uses())
    ]
