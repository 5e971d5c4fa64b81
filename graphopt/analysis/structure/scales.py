"""The scales of ``DequantizeLinear`` of matrices: whole, and of rows that are looked up; not those of convolutions.

And which packed products have scales in two levels.
"""

from __future__ import annotations

import onnx_ir as ir

from graphopt.analysis.structure.convolutions import is_of_convolution
from graphopt.analysis.structure.decoded_weights import is_decoded_weight
from graphopt.analysis.structure.products import reads_packed
from graphopt.graph.weights import expression_of


def scale_values(graph: ir.Graph) -> list[ir.Value]:
    """Return every initializer that holds scales of ``DequantizeLinear``, and every other one that is the same tensor.

    The others are read by lookups of codes, which have the tensors of a product under names of their own.
    """
    values = dict.fromkeys(value for node in graph if (value := _scales(node)) is not None and value.is_initializer())
    tensors = {expression_of(value.const_value).digest for value in values if value.const_value is not None}
    kinds = {_kind(value) for value in values}
    for value in graph.initializers.values():
        is_candidate = value not in values and value.const_value is not None and _kind(value) in kinds
        if is_candidate and value.uses() and expression_of(value.const_value).digest in tensors:
            values[value] = None
    return list(values)


def widened_scales(graph: ir.Graph) -> dict[ir.Node, ir.Value]:
    """Return every ``Cast`` that makes float32 scales of an initializer in float16, with that initializer."""
    casts: dict[ir.Node, ir.Value] = {}
    for node in graph:
        value = _scales(node)
        cast = None if value is None else value.producer()
        if cast is not None and (narrow := _stored_half(cast)) is not None:
            casts[cast] = narrow
    tensors = {expression_of(value.const_value).digest for value in casts.values()}
    for node in graph:
        narrow = _stored_half(node)
        if node not in casts and narrow is not None and expression_of(narrow.const_value).digest in tensors:
            casts[node] = narrow
    return casts


def leveled_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes that read packed codes and scales in two levels, in order."""
    return [node for node in graph if reads_packed(node) and node.attributes.get_int("span", 0) != 0]


def _kind(value: ir.Value) -> tuple[object, ...]:
    return (value.dtype, *(value.shape or ()))


def _scales(node: ir.Node) -> ir.Value | None:
    if (node.domain, node.op_type) != ("", "DequantizeLinear") or is_of_convolution(node) or is_decoded_weight(node):
        return None
    value = node.inputs[1]
    producer = None if value is None else value.producer()
    looked_up = producer is not None and (producer.domain, producer.op_type) == ("", "Gather")
    return producer.inputs[0] if producer is not None and looked_up else value


def _stored_half(node: ir.Node) -> ir.Value | None:
    """Return the initializer in float16 that ``node`` casts to float32, if that is what it does."""
    value = node.inputs[0] if (node.domain, node.op_type) == ("", "Cast") else None
    if value is None or not value.is_initializer() or value.const_value is None:
        return None
    narrow = value.dtype == ir.DataType.FLOAT16 and node.outputs[0].dtype in (None, ir.DataType.FLOAT)
    return value if narrow and node.attributes.get_int("to", 0) == ir.DataType.FLOAT else None
