"""What rules have in common: pin everything, join axis by axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.bases.axes import BasisGraph
from graphopt.analysis.bases.pins import OBSERVED
from graphopt.graph.weights import weight_of

if TYPE_CHECKING:
    from graphopt.graph.diagnostics import Fact

Rule = Callable[[BasisGraph, ir.Node], None]


def observe(found: BasisGraph, node: ir.Node) -> None:
    """Pin every axis the node touches: nothing is known about what it does to a basis."""
    pin_all(found, node, OBSERVED(op=node.op_type))


def ignore(found: BasisGraph, node: ir.Node) -> None:
    """Do nothing: the node reads shapes, not values."""
    del found, node


def pin_all(found: BasisGraph, node: ir.Node, reason: Fact) -> None:
    """Pin every floating-point axis of inputs (observed) and outputs (made)."""
    for values, side in ((node.inputs, "observed"), (node.outputs, "made")):
        for value in values:
            if value is None or value.is_initializer() or (value.dtype and not value.dtype.is_floating_point()):
                continue
            for axis in found.axes(value):
                found.pin(axis, node.name or "", reason, side)  # type: ignore[arg-type]


def join_through(found: BasisGraph, node: ir.Node, x: ir.Value, y: ir.Value, *, but: Sequence[int] = ()) -> None:
    """Join equal axes of ``x`` and ``y``, which have the same rank, except those counted from the front in ``but``."""
    for index, (before, after) in enumerate(zip(found.axes(x), found.axes(y), strict=True)):
        if index not in but:
            found.join(before, after, node)


def ranked(*values: ir.Value | None) -> bool:
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
