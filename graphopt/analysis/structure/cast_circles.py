"""Casts that give numbers back the type that they had."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.value_types import type_of

# Binary digits that a float of each type holds, the one that is not stored among them.
_DIGITS = {ir.DataType.FLOAT16: 11, ir.DataType.BFLOAT16: 8, ir.DataType.FLOAT: 24, ir.DataType.DOUBLE: 53}


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
    if narrow.is_integer() and wide.is_floating_point():  # NumPy calls int64 in float64 safe, which is so up to 2**53
        return narrow.bitwidth <= _DIGITS.get(wide, 0)
    try:
        return bool(np.can_cast(narrow.numpy(), wide.numpy(), "safe"))
    except TypeError:  # a type that NumPy has not
        return False
