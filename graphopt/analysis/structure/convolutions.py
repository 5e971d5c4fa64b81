"""Convolutions whose weights, inputs and results are codes.

codes = QuantizeLinear(x)
y = Conv(DequantizeLinear(codes), DequantizeLinear(codes of W), DequantizeLinear(codes of b))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

_WEIGHT, _BIAS = 1, 2


def is_of_convolution(node: ir.Node) -> bool:
    """Return whether ``node`` decodes a tensor that was encoded at run time, or a weight or bias of convolutions."""
    if (node.domain, node.op_type) != ("", "DequantizeLinear") or node.inputs[0] is None:
        return False
    encoder = node.inputs[0].producer()
    if encoder is not None:
        return (encoder.domain, encoder.op_type) == ("", "QuantizeLinear")
    output = node.outputs[0]
    uses = [(use.node.domain, use.node.op_type, use.idx) for use in output.uses()]
    return not output.is_graph_output() and all(use in (("", "Conv", _WEIGHT), ("", "Conv", _BIAS)) for use in uses)


def integer_convolutions(graph: ir.Graph) -> list[ir.Node]:
    """Return every ``Conv`` of codes with codes: what onnxruntime has a product of integers for."""
    return [
        node
        for node in graph
        if (node.domain, node.op_type) == ("", "Conv")
        and all(_is_decoded(value) for value in node.inputs[:2])
        and _is_encoded_at_run_time(node.inputs[0])
    ]


def _is_decoded(value: ir.Value | None) -> bool:
    producer = None if value is None else value.producer()
    return producer is not None and is_of_convolution(producer)


def _is_encoded_at_run_time(value: ir.Value | None) -> bool:
    producer = None if value is None else value.producer()
    codes = None if producer is None else producer.inputs[0]
    return codes is not None and codes.producer() is not None
