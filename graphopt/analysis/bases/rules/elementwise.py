"""Ops that work element by element, and norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphopt.analysis.bases.pins import (
    CHOSEN_BY_WHERE,
    COORDINATE_BY_COORDINATE,
    GAIN,
    MEAN,
    NORM_SPANS_MORE,
    NUMBER_ADDED,
    RANK_UNKNOWN,
    ROTATED_ONLINE,
    ROTATION_READS,
    SAME_ADDED,
)
from graphopt.analysis.bases.rules.common import has_ranks, join_through, observe, pin_node, rank
from graphopt.graph.weights import weight_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from graphopt.analysis.bases.axes import Axis, BasisGraph
    from graphopt.graph.diagnostics import Fact


def add(bases: BasisGraph, node: ir.Node) -> None:
    """``a + b``: a Q + b Q = (a + b) Q; a constant vector is a writer of its own."""
    y = node.outputs[0]
    if not has_ranks(y, *node.inputs):
        observe(bases, node)
        return
    targets = bases.axes(y)
    for position, value in enumerate(node.inputs):
        assert value is not None
        _add_term(bases, node, position, value, targets)
        if targets and not value.shape:
            bases.pin(targets[-1], node, NUMBER_ADDED(), "observed")


def _add_term(bases: BasisGraph, node: ir.Node, position: int, value: ir.Value, targets: Sequence[Axis]) -> None:
    y, is_constant = node.outputs[0], weight_of(node, position) is not None
    for index in range(-rank(value), 0):
        target = targets[index]
        if not _spans(value, index) and _spans(y, index):
            bases.pin(target, node, SAME_ADDED(), "observed")
        elif is_constant:
            bases.add_writer(target, node, position, index % rank(value))
        else:
            bases.join(bases.axis(value, index), target, node)


def scale(bases: BasisGraph, node: ir.Node) -> None:
    """``c x``: c (x Q) = (c x) Q along every axis on which c does not vary; elsewhere coordinates are multiplied."""
    y = node.outputs[0]
    if not has_ranks(y, *node.inputs):
        observe(bases, node)
        return
    targets = bases.axes(y)
    for index in range(-len(targets), 0):
        factors = [value for value in node.inputs if value is not None and _spans(value, index)]
        is_linear = len(factors) == 1 and (node.op_type == "Mul" or factors[0] is node.inputs[0])
        if is_linear and not factors[0].is_initializer():
            bases.join(bases.axis(factors[0], index), targets[index], node)
        else:
            _pin_along(bases, node, factors, index, COORDINATE_BY_COORDINATE(op=node.op_type))


def select(bases: BasisGraph, node: ir.Node) -> None:
    """``c ? 0 : x``, ``c ? a : b``: whole rows are chosen along every axis on which c does not vary, and 0 Q = 0."""
    condition, y = node.inputs[0], node.outputs[0]
    if condition is None or not has_ranks(y, *node.inputs):
        observe(bases, node)
        return
    branches = [value for value in node.inputs[1:] if value is not None and not _is_zero(value)]
    targets = bases.axes(y)
    for index in range(-len(targets), 0):
        if not _spans(condition, index) and all(_varies(value, index) for value in branches):
            for value in branches:
                bases.join(bases.axis(value, index), targets[index], node)
        else:
            _pin_along(bases, node, branches, index, CHOSEN_BY_WHERE())


def _pin_along(bases: BasisGraph, node: ir.Node, values: Sequence[ir.Value], index: int, reason: Fact) -> None:
    """Pin axis ``index`` of the output, and of those of ``values`` that vary along it."""
    bases.pin(bases.axis(node.outputs[0], index), node, reason, "made")
    for value in values:
        if _varies(value, index):
            bases.pin(bases.axis(value, index), node, reason, "observed")


def _is_zero(value: ir.Value) -> bool:
    return value.const_value is not None and not np.any(value.const_value.numpy())


def _spans(value: ir.Value, index: int) -> bool:
    return value.shape is not None and len(value.shape) >= -index and value.shape[index] != 1


def _varies(value: ir.Value, index: int) -> bool:
    """Return whether ``value`` is computed and has more than one entry along axis ``index``."""
    return _spans(value, index) and not value.is_initializer()


def carry(bases: BasisGraph, node: ir.Node) -> None:
    """``-x``, ``Identity`` and ``Cast`` between floating-point types: (-x) Q = -(x Q)."""
    x, y = node.inputs[0], node.outputs[0]
    if x is not None and has_ranks(x, y) and all(v.dtype is not None and v.dtype.is_floating_point() for v in (x, y)):
        join_through(bases, node, x, y)
    else:
        observe(bases, node)


def root_mean_square(bases: BasisGraph, node: ir.Node) -> None:
    """``x / rms(x)``: |x Q| = |x|, so a norm with unit gain lets any orthogonal map through."""
    gain, x = weight_of(node, 1), node.inputs[0]
    if gain is None or gain.const_value is None or not np.all(gain.const_value.numpy() == 1):
        _pin_norm(bases, node, GAIN())
    elif x is not None and has_ranks(x, node.outputs[0]) and _spans_last(node, x):
        join_through(bases, node, x, node.outputs[0])
    else:
        _pin_norm(bases, node, NORM_SPANS_MORE())


def layer_norm(bases: BasisGraph, node: ir.Node) -> None:
    """``x - mean(x)``: the mean is taken over these coordinates, and no others."""
    _pin_norm(bases, node, MEAN())


def _pin_norm(bases: BasisGraph, node: ir.Node, reason: Fact) -> None:
    """Pin the axes that a norm spans; vectors along the others are normalized on their own."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or not has_ranks(x, y):
        observe(bases, node)
        return
    axes = range(node.attributes.get_int("axis", -1) % rank(x), rank(x))
    join_through(bases, node, x, y, but=axes)
    for index in axes:
        bases.pin(bases.axis(x, index), node, reason, "observed")
        bases.pin(bases.axis(y, index), node, reason, "made")
    for extra in node.outputs[1:]:
        bases.pin_axes(bases.axes(extra), node, reason, "made")


def _spans_last(node: ir.Node, x: ir.Value) -> bool:
    return node.attributes.get_int("axis", -1) in (-1, rank(x) - 1)


def hadamard(bases: BasisGraph, node: ir.Node) -> None:
    """``Hadamard(x)``: a rotation made at run time. A second one behind it would cost time and gain nothing."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or not has_ranks(x, y):
        pin_node(bases, node, RANK_UNKNOWN())
        return
    last = rank(x) - 1
    join_through(bases, node, x, y, but=[last])
    bases.pin(bases.axis(x, last), node, ROTATION_READS(), "observed")
    bases.pin(bases.axis(y, last), node, ROTATED_ONLINE(), "observed")
