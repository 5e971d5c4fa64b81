"""Casts that give numbers back the type that they had."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.value_types import type_of


def cast_circles(graph: ir.Graph) -> list[ir.Node]:
    """Return each cast of a cast that leads back to the type before both, with every number as it was.

    That is so where the type between them holds all numbers of the first.
    """
    nodes = []
    for node in graph:
        first = _cast_behind(node)
        source = None if first is None else first.inputs[0]
        kind = None if source is None else type_of(source)
        if first is None or kind is None:
            continue
        if kind == _target(node) and _holds(_target(first), kind):
            nodes.append(node)
    return nodes


def _cast_behind(node: ir.Node) -> ir.Node | None:
    """Return the cast that a cast reads."""
    if node.domain or node.op_type != "Cast" or node.inputs[0] is None or node.outputs[0].is_graph_output():
        return None
    producer = node.inputs[0].producer()
    return producer if producer is not None and (producer.domain, producer.op_type) == ("", "Cast") else None


def _target(node: ir.Node) -> ir.DataType:
    return ir.DataType(node.attributes.get_int("to", 1))


def _holds(wide: ir.DataType, narrow: ir.DataType) -> bool:
    try:
        return bool(np.can_cast(narrow.numpy(), wide.numpy(), "safe"))
    except TypeError:  # a type that NumPy has not
        return False
