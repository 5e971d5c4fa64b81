"""Scales, zero points and minimums of codes of matrices: stored as they are read, or computed of shorter numbers.

Those of ``DequantizeLinear`` of matrices and of packed products, whole and of rows that are looked up; not those of
convolutions, nor those of weights that are decoded to floats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.analysis.structure.convolutions import is_of_convolution
from graphopt.analysis.structure.decoded_weights import is_decoded_weight
from graphopt.analysis.structure.products import reads_packed
from graphopt.graph.weights import expression_of
from graphopt.runtime_ops import Role, signature_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

_COMPUTE = frozenset(("Cast", "Mul", "Add", "Gather", "GatherElements", "Reshape"))
"""What stored parts of scales go through: see :mod:`graphopt.passes.common.scale_forms`."""


def scale_values(graph: ir.Graph) -> list[ir.Value]:
    """Return every initializer that holds scales of codes, and every other one that is the same tensor.

    The others are read by lookups of codes, which have the tensors of a product under names of their own. Zero points
    and minimums of packed products are among them, which are numbers as scales are.
    """
    values = dict.fromkeys(value for node in graph for value in _scales(node) if value.is_initializer())
    tensors = {expression_of(value.const_value).digest for value in values if value.const_value is not None}
    kinds = {_kind(value) for value in values}
    for value in graph.initializers.values():
        is_candidate = value not in values and value.const_value is not None and _kind(value) in kinds
        if is_candidate and value.uses() and expression_of(value.const_value).digest in tensors:
            values[value] = None
    return list(values)


def computed_scales(graph: ir.Graph) -> list[ir.Value]:
    """Return scales that are computed of initializers alone, and what is computed of the same initializers for lookups.

    Those in two levels, which the step ``level_scales`` makes, are not among them.
    """
    values = dict.fromkeys(
        value
        for node in graph
        for value in _scales(node)
        if not value.is_initializer() and _is_computed(value) and not _is_leveled(value)
    )
    tensors = {expression_of(part.const_value).digest for value in values for part in parts_of(value)}
    for node in graph:
        value = node.outputs[0]
        is_last = (node.domain, node.op_type) in (("", "Cast"), ("", "Reshape"))
        if not tensors or value in values or not is_last or not _is_computed(value):
            continue
        if {expression_of(part.const_value).digest for part in parts_of(value)} <= tensors:
            values[value] = None
    return [value for value in values if not _is_inside(value, values)]


def parts_of(value: ir.Value) -> list[ir.Value]:
    """Return the initializers that a value is computed of; itself if it is one."""
    producer = value.producer()
    if producer is None:
        return [value]
    return [part for operand in producer.inputs if operand is not None for part in parts_of(operand)]


def _is_computed(value: ir.Value) -> bool:
    producer = value.producer()
    if producer is None:
        return value.is_initializer() and value.const_value is not None
    is_known = not producer.domain and producer.op_type in _COMPUTE
    return is_known and all(operand is not None and _is_computed(operand) for operand in producer.inputs)


def _is_inside(value: ir.Value, values: dict[ir.Value, None]) -> bool:
    """Return whether another of the values is computed of this one alone."""
    uses = value.uses()
    return bool(uses) and all(
        (use.node.domain == "" and use.node.op_type in _COMPUTE and use.node.outputs[0] in values) for use in uses
    )


def _is_leveled(value: ir.Value) -> bool:
    """Return whether scales are the product of levels and steps of whole columns: ``Cast(Mul(Cast, Cast))``."""
    cast = value.producer()
    product = None if cast is None or cast.op_type != "Cast" else cast.inputs[0]
    producer = None if product is None else product.producer()
    return producer is not None and producer.op_type == "Mul"


def _kind(value: ir.Value) -> tuple[object, ...]:
    return (value.dtype, *(value.shape or ()))


def _scales(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the scales that a node reads, and zero points that are numbers; of rows that are looked up, all rows."""
    if node.domain:
        signature = signature_of(node) if reads_packed(node) else None
        for port, value in zip(signature.inputs if signature else (), node.inputs, strict=False):
            is_read = port.role in (Role.SCALES, Role.ZERO_POINTS) and not port.is_absent(value)
            if is_read and value is not None and value.dtype is not None and value.dtype.is_floating_point():
                yield value
        return
    if node.op_type != "DequantizeLinear" or is_of_convolution(node) or is_decoded_weight(node):
        return
    value = node.inputs[1]
    producer = None if value is None else value.producer()
    looked_up = producer is not None and (producer.domain, producer.op_type) == ("", "Gather")
    if looked_up and producer is not None and not _is_computed(producer.outputs[0]):
        value = producer.inputs[0]
    if value is not None:
        yield value
