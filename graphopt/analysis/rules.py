"""What each op does to bases; one function an op, with the algebra that allows it.

An op that is not listed observes what it touches. The algebra is stated for row vectors, x -> x Q.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from graphopt.analysis.axes import BasisGraph
from graphopt.weights import weight_of

Rule = Callable[[BasisGraph, ir.Node], None]


def observe(found: BasisGraph, node: ir.Node) -> None:
    """Pin every floating-point axis the node touches: nothing is known about what it does to a basis."""
    _pin_all(found, node, f"{node.op_type} looks at single coordinates, or is not followed by the analysis")


def ignore(found: BasisGraph, node: ir.Node) -> None:
    """Nothing: the node reads shapes, not values."""
    del found, node


def matmul(found: BasisGraph, node: ir.Node) -> None:
    """``x W``: (x Q)(Q^T W) = x W, and x (W Q) = (x W) Q; W's rows read, its columns write."""
    weight, x, y = weight_of(node, 1), node.inputs[0], node.outputs[0]
    if weight is None or weight.shape is None or len(weight.shape) != 2 or not _ranked(x) or weight_of(node, 0):
        _pin_all(found, node, "MatMul without a constant matrix on its right")
        return
    assert x is not None and x.shape is not None
    rank = len(x.shape)
    found.read(found.axis(x, -1, rank), node, 1, 0)
    found.write(found.axis(y, -1, rank), node, 1, 1)
    for index in range(rank - 1):
        found.join(found.axis(x, index, rank), found.axis(y, index, rank), node)


def gather(found: BasisGraph, node: ir.Node) -> None:
    """``table[ids]``: (table Q)[ids] = table[ids] Q; the table's columns write."""
    table, ids, y = weight_of(node, 0), node.inputs[1], node.outputs[0]
    if table is None or table.dtype is None or not table.dtype.is_floating_point():
        if y.dtype is not None and y.dtype.is_floating_point():
            observe(found, node)
        return
    if table.shape is None or len(table.shape) != 2 or node.attributes.get_int("axis", 0) != 0 or not _ranked(ids):
        observe(found, node)
        return
    assert ids is not None and ids.shape is not None
    found.write(found.axis(y, -1, len(ids.shape) + 1), node, 0, 1)


def add(found: BasisGraph, node: ir.Node) -> None:
    """``a + b``: a Q + b Q = (a + b) Q; a constant vector is a writer of its own."""
    y = node.outputs[0]
    if not _ranked(y):
        observe(found, node)
        return
    assert y.shape is not None
    rank = len(y.shape)
    if rank == 0:
        return
    for position, value in enumerate(node.inputs):
        if not _ranked(value):
            _pin_all(found, node, "an input whose shape is unknown")
            return
        assert value is not None and value.shape is not None
        constant = weight_of(node, position) is not None
        for index in range(-len(value.shape), 0):
            target = found.axis(y, index, rank)
            if value.shape[index] == y.shape[index] or not isinstance(value.shape[index], int):
                if constant:
                    found.write(target, node, position, index % len(value.shape))
                else:
                    found.join(found.axis(value, index, len(value.shape)), target, node)
            else:
                found.pin(target, node.name or "", "a vector of width 1 is spread over it")
        if len(value.shape) == 0:
            found.pin(found.axis(y, -1, rank), node.name or "", "a number is added to every coordinate")


def scale(found: BasisGraph, node: ir.Node) -> None:
    """``c x`` for one constant number c: c (x Q) = (c x) Q. Any other product looks at single coordinates."""
    positions = [p for p in range(2) if (w := weight_of(node, p)) is not None and w.const_value.size == 1]  # type: ignore[union-attr]
    if len(positions) != 1 or (node.op_type == "Div" and positions != [1]):
        _pin_all(found, node, f"{node.op_type} of two activations works coordinate by coordinate")
        return
    _join_through(found, node, node.inputs[1 - positions[0]])


def root_mean_square(found: BasisGraph, node: ir.Node) -> None:
    """``x / rms(x)``: |x Q| = |x|, so a norm with unit gain lets any orthogonal map through."""
    gain, x = weight_of(node, 1), node.inputs[0]
    if not _ranked(x):
        observe(found, node)
        return
    _join_through(found, node, x)
    assert x is not None and x.shape is not None
    last = found.axis(x, -1, len(x.shape))
    if node.attributes.get_int("axis", -1) not in (-1, len(x.shape) - 1):
        found.pin(last, node.name or "", "the norm spans more than the last axis")
    elif gain is None or gain.const_value is None or not np.all(gain.const_value.numpy() == 1):
        found.pin(last, node.name or "", "the norm has a gain of its own, which fold_norms could not move into weights")


def carry(found: BasisGraph, node: ir.Node) -> None:
    """``Identity`` and ``Cast`` between floating-point types: the same axes."""
    x, y = node.inputs[0], node.outputs[0]
    if x is not None and all(v.dtype is not None and v.dtype.is_floating_point() for v in (x, y)) and _ranked(x):
        _join_through(found, node, x)
    else:
        observe(found, node)


def _join_through(found: BasisGraph, node: ir.Node, x: ir.Value | None) -> None:
    if not _ranked(x):
        observe(found, node)
        return
    assert x is not None and x.shape is not None
    rank = len(x.shape)
    for index in range(rank):
        found.join(found.axis(x, index, rank), found.axis(node.outputs[0], index, rank), node)


def _ranked(value: ir.Value | None) -> bool:
    return value is not None and value.shape is not None


def _pin_all(found: BasisGraph, node: ir.Node, reason: str) -> None:
    for value in (*node.inputs, *node.outputs):
        if value is None or value.shape is None or value.is_initializer():
            continue
        if value.dtype is not None and not value.dtype.is_floating_point():
            continue
        for index in range(len(value.shape)):
            found.pin(found.axis(value, index, len(value.shape)), node.name or "", reason)


RULES: dict[tuple[str, str], Rule] = {
    ("", "MatMul"): matmul,
    ("", "Gather"): gather,
    ("", "Add"): add,
    ("", "Sub"): add,
    ("", "Mul"): scale,
    ("", "Div"): scale,
    ("", "RMSNormalization"): root_mean_square,
    ("", "Identity"): carry,
    ("", "Cast"): carry,
    ("", "Shape"): ignore,
    ("", "Size"): ignore,
}
