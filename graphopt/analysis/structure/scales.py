"""The scales of ``DequantizeLinear``: whole, and of rows that are looked up."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.graph.weights import expression_of


def scale_values(graph: ir.Graph) -> list[ir.Value]:
    """Return every initializer that holds scales of ``DequantizeLinear``, and every other one that is the same tensor.

    The others are read by lookups of codes, which have the tensors of a product under names of their own.
    """
    found = dict.fromkeys(value for node in graph if (value := _scales(node)) is not None and value.is_initializer())
    tensors = {expression_of(value.const_value).digest for value in found if value.const_value is not None}
    kinds = {_kind(value) for value in found}
    for value in graph.initializers.values():
        alike = value not in found and value.const_value is not None and _kind(value) in kinds
        if alike and value.uses() and expression_of(value.const_value).digest in tensors:
            found[value] = None
    return list(found)


def widened_scales(graph: ir.Graph) -> dict[ir.Node, ir.Value]:
    """Return every ``Cast`` that makes float32 scales of an initializer in float16, with that initializer."""
    found: dict[ir.Node, ir.Value] = {}
    for node in graph:
        value = _scales(node)
        cast = None if value is None else value.producer()
        if cast is not None and (stored := _stored(cast)) is not None:
            found[cast] = stored
    tensors = {expression_of(value.const_value).digest for value in found.values()}
    for node in graph:
        stored = _stored(node)
        if node not in found and stored is not None and expression_of(stored.const_value).digest in tensors:
            found[node] = stored
    return found


def _kind(value: ir.Value) -> tuple[object, ...]:
    return (value.dtype, *(value.shape or ()))


def _scales(node: ir.Node) -> ir.Value | None:
    if (node.domain, node.op_type) != ("", "DequantizeLinear"):
        return None
    value = node.inputs[1]
    producer = None if value is None else value.producer()
    looked_up = producer is not None and (producer.domain, producer.op_type) == ("", "Gather")
    return producer.inputs[0] if producer is not None and looked_up else value


def _stored(node: ir.Node) -> ir.Value | None:
    """Return the initializer in float16 that ``node`` casts to float32, if that is what it does."""
    value = node.inputs[0] if (node.domain, node.op_type) == ("", "Cast") else None
    if value is None or not value.is_initializer() or value.const_value is None:
        return None
    narrow = value.dtype == ir.DataType.FLOAT16 and node.outputs[0].dtype in (None, ir.DataType.FLOAT)
    return value if narrow and node.attributes.get_int("to", 0) == ir.DataType.FLOAT else None
