"""Ops that work element by element, and norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphopt.analysis.bases.pins import (
    CHOSEN,
    COORDINATE_BY_COORDINATE,
    GAIN,
    MEAN,
    NORM_SPANS_MORE,
    NUMBER_ADDED,
    RANK_UNKNOWN,
    ROTATED,
    ROTATION_READS,
    SAME_ADDED,
)
from graphopt.analysis.bases.rules.common import join_through, observe, pin_all, rank, ranked
from graphopt.graph.weights import weight_of

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.analysis.bases.axes import BasisGraph
    from graphopt.graph.diagnostics import Fact


def add(found: BasisGraph, node: ir.Node) -> None:
    """``a + b``: a Q + b Q = (a + b) Q; a constant vector is a writer of its own."""
    y = node.outputs[0]
    if not ranked(y, *node.inputs):
        observe(found, node)
        return
    targets = found.axes(y)
    for position, value in enumerate(node.inputs):
        assert value is not None and value.shape is not None and y.shape is not None
        constant = weight_of(node, position) is not None
        for index in range(-len(value.shape), 0):
            target = targets[index]
            if value.shape[index] == 1 and y.shape[index] != 1:
                found.pin(target, node.name or "", SAME_ADDED(), "observed")
            elif constant:
                found.write(target, node, position, index % len(value.shape))
            else:
                found.join(found.axis(value, index), target, node)
        if targets and not value.shape:
            found.pin(targets[-1], node.name or "", NUMBER_ADDED(), "observed")


def scale(found: BasisGraph, node: ir.Node) -> None:
    """``c x``: c (x Q) = (c x) Q along every axis on which c does not vary; elsewhere coordinates are multiplied."""
    y = node.outputs[0]
    if not ranked(y, *node.inputs):
        observe(found, node)
        return
    targets = found.axes(y)
    for index in range(-len(targets), 0):
        spans = [value for value in node.inputs if value is not None and _spans(value, index)]
        target = targets[index]
        linear = len(spans) == 1 and (node.op_type == "Mul" or spans[0] is node.inputs[0])
        if linear and not spans[0].is_initializer():
            found.join(found.axis(spans[0], index), target, node)
            continue
        reason = COORDINATE_BY_COORDINATE(op=node.op_type)
        found.pin(target, node.name or "", reason, "made")
        for value in spans:
            if not value.is_initializer():
                found.pin(found.axis(value, index), node.name or "", reason, "observed")


def where(found: BasisGraph, node: ir.Node) -> None:
    """``c ? 0 : x``, ``c ? a : b``: whole rows are chosen along every axis on which c does not vary, and 0 Q = 0."""
    condition, y = node.inputs[0], node.outputs[0]
    if condition is None or not ranked(y, *node.inputs):
        observe(found, node)
        return
    targets = found.axes(y)
    for index in range(-len(targets), 0):
        target = targets[index]
        moving = [value for value in node.inputs[1:] if value is not None and not _is_zero(value)]
        if not _spans(condition, index) and all(_spans(v, index) and not v.is_initializer() for v in moving):
            for value in moving:
                found.join(found.axis(value, index), target, node)
            continue
        reason = CHOSEN()
        found.pin(target, node.name or "", reason, "made")
        for value in moving:
            if _spans(value, index) and not value.is_initializer():
                found.pin(found.axis(value, index), node.name or "", reason, "observed")


def _is_zero(value: ir.Value) -> bool:
    return value.const_value is not None and not np.any(value.const_value.numpy())


def _spans(value: ir.Value, index: int) -> bool:
    return value.shape is not None and len(value.shape) >= -index and value.shape[index] != 1


def carry(found: BasisGraph, node: ir.Node) -> None:
    """``-x``, ``Identity`` and ``Cast`` between floating-point types: (-x) Q = -(x Q)."""
    x, y = node.inputs[0], node.outputs[0]
    if x is not None and ranked(x, y) and all(v.dtype is not None and v.dtype.is_floating_point() for v in (x, y)):
        join_through(found, node, x, y)
    else:
        observe(found, node)


def root_mean_square(found: BasisGraph, node: ir.Node) -> None:
    """``x / rms(x)``: |x Q| = |x|, so a norm with unit gain lets any orthogonal map through."""
    gain, x = weight_of(node, 1), node.inputs[0]
    if gain is None or gain.const_value is None or not np.all(gain.const_value.numpy() == 1):
        _norm(found, node, GAIN())
    elif x is not None and ranked(x, node.outputs[0]) and _spans_last(node, x):
        join_through(found, node, x, node.outputs[0])
    else:
        _norm(found, node, NORM_SPANS_MORE())


def layer_norm(found: BasisGraph, node: ir.Node) -> None:
    """``x - mean(x)``: the mean is taken over these coordinates, and no others."""
    _norm(found, node, MEAN())


def _norm(found: BasisGraph, node: ir.Node, reason: Fact) -> None:
    """Pin the axes that a norm spans; vectors along the others are normalized on their own."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or not ranked(x, y):
        observe(found, node)
        return
    first = node.attributes.get_int("axis", -1) % rank(x)
    spanned = range(first, rank(x))
    join_through(found, node, x, y, but=spanned)
    for index in spanned:
        found.pin(found.axis(x, index), node.name or "", reason, "observed")
        found.pin(found.axis(y, index), node.name or "", reason, "made")
    for extra in node.outputs[1:]:
        for axis in found.axes(extra):
            found.pin(axis, node.name or "", reason, "made")


def _spans_last(node: ir.Node, x: ir.Value) -> bool:
    return node.attributes.get_int("axis", -1) in (-1, rank(x) - 1)


def hadamard(found: BasisGraph, node: ir.Node) -> None:
    """``Hadamard(x)``: a rotation made at run time. A second one behind it would cost time and gain nothing."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or not ranked(x, y):
        pin_all(found, node, RANK_UNKNOWN())
        return
    last = rank(x) - 1
    join_through(found, node, x, y, but=[last])
    found.pin(found.axis(x, last), node.name or "", ROTATION_READS(), "observed")
    found.pin(found.axis(y, last), node.name or "", ROTATED(), "observed")
