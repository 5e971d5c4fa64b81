"""The weights of a graph: find one, own one, rewrite one, make one.

A rewrite puts an expression in the place of a tensor and evaluates nothing; bytes are read, computed and written one
weight at a time when the model is saved, so a model larger than memory needs the memory of its largest tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.graph.weights.arithmetic import DOUBLE, Cast
from graphopt.graph.weights.tensor import WeightTensor, expression_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphopt.graph.weights.expression import Expression


def weight_of(node: ir.Node, index: int) -> ir.Value | None:
    """Return the initializer that is input ``index`` of ``node``, or ``None`` where it is computed or absent."""
    value = node.inputs[index] if index < len(node.inputs) else None
    return value if value is not None and value.is_initializer() and value.const_value is not None else None


def own_input(node: ir.Node, index: int) -> ir.Value:
    """Return input ``index`` of ``node`` as an initializer that no other node uses, copied (lazily) if it was shared.

    Exporters give equal constants one initializer, and tied models share embedding and head: a pass that edits a
    weight owns it first.
    """
    value = weight_of(node, index)
    if value is None or node.graph is None:
        raise ValueError(f"input {index} of {node.name} is no initializer")
    if len(value.uses()) == 1 and not value.is_graph_output():
        return value
    copy = new_weight(node.graph, f"{value.name}.{node.name}", value.const_value)
    copy.metadata_props.update(value.metadata_props)
    node.replace_input_with(index, copy)
    return copy


def new_weight(graph: ir.Graph, name: str, tensor: ir.TensorProtocol | None) -> ir.Value:
    """Register ``tensor`` as a new initializer of ``graph`` under ``name``, made unique if it is taken."""
    assert tensor is not None
    unique, number = name, 1
    while unique in graph.initializers:
        unique, number = f"{name}.{number}", number + 1
    value = ir.val(unique, const_value=tensor)
    graph.initializers[unique] = value
    return value


def rewrite(weight: ir.Value, *steps: Callable[[Expression], Expression]) -> None:
    """Replace the tensor of ``weight`` by one function of it after another.

    They are computed in float64, and the result is rounded once, at the end, to the type that the tensor has.

    Args:
        weight: an initializer that its reader owns, see :func:`own_input`.
        steps: each takes the float64 expression of what is before it, and returns one of the same shape.

    Raises:
        ValueError: a step changes the shape.
    """
    source = expression_of(weight.const_value)
    result: Expression = Cast(source, DOUBLE)
    for step in steps:
        result = step(result)
    if result.shape != source.shape:
        raise ValueError(f"weight {weight.name} came out as {result.shape}, promised as {source.shape}")
    weight.const_value = WeightTensor(Cast(result, source.dtype), weight.name)
