"""What rules have in common: pin everything, join axis by axis."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.bases.axes import BasisGraph
from graphopt.analysis.bases.pins import COORDINATES_OBSERVED
from graphopt.graph.weights import weight_of

if TYPE_CHECKING:
    from graphopt.graph.diagnostics import Fact

Rule = Callable[[BasisGraph, ir.Node], None]


def observe(bases: BasisGraph, node: ir.Node) -> None:
    """Pin every axis the node touches: nothing is known about what it does to a basis."""
    pin_node(bases, node, COORDINATES_OBSERVED(op=node.op_type))


def ignore(bases: BasisGraph, node: ir.Node) -> None:
    """Do nothing: the node reads shapes, not values."""
    del bases, node


def unary(rule: Callable[[BasisGraph, ir.Node, ir.Value, ir.Value], None]) -> Rule:
    """Make a rule of a function of a node, its first input and its first output.

    The function is called where both ranks are known; elsewhere the node observes what it touches.
    """

    @functools.wraps(rule)
    def check_ranks(bases: BasisGraph, node: ir.Node) -> None:
        x, y = node.inputs[0], node.outputs[0]
        if x is None or not has_ranks(x, y):
            observe(bases, node)
        else:
            rule(bases, node, x, y)

    return check_ranks


def pin_node(bases: BasisGraph, node: ir.Node, reason: Fact) -> None:
    """Pin every floating-point axis of inputs (observed) and outputs (made)."""
    for value in node.inputs:
        if value is not None and not value.is_initializer() and is_floating(value):
            bases.pin_axes(bases.axes(value), node, reason, "observed")
    for value in node.outputs:
        if is_floating(value):
            bases.pin_axes(bases.axes(value), node, reason, "made")


def join_through(bases: BasisGraph, node: ir.Node, x: ir.Value, y: ir.Value, *, but: Sequence[int] = ()) -> None:
    """Join equal axes of ``x`` and ``y``, which have the same rank, except those counted from the front in ``but``."""
    for index, (before, after) in enumerate(zip(bases.axes(x), bases.axes(y), strict=True)):
        if index not in but:
            bases.join(before, after, node)


def is_floating(value: ir.Value) -> bool:
    """Return whether ``value`` holds floating-point numbers, or may hold them."""
    return value.dtype is None or value.dtype.is_floating_point()


def has_ranks(*values: ir.Value | None) -> bool:
    """Return whether every value is there and its rank is known."""
    return all(value is not None and value.shape is not None for value in values)


def rank(value: ir.Value) -> int:
    """Return the rank of ``value``, which is known."""
    assert value.shape is not None
    return len(value.shape)


def integers(node: ir.Node, index: int) -> list[int] | None:
    """Return input ``index`` as numbers where it is a constant of integers, else ``None``."""
    constant = weight_of(node, index)
    if constant is None or constant.const_value is None:
        return None
    return [int(number) for number in constant.const_value.numpy().reshape(-1)]
