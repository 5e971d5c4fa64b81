"""Weights that only change their layout on the way to what reads them are stored as they are read.

    MatMul(x, Transpose(W))                                ->   MatMul(x, W.transposed)
    MatMul(x, Squeeze(Split(stack; axis=0)[e], [0]))       ->   MatMul(x, stack.e)

So a weight is seen as a weight: a tied lm_head, and each expert of a mixture (Shazeer et al. 2017), which exporters
keep in stacks [experts, rows, columns]. Nothing is read here. What is stored is a view of the original, so that writing
an expert copies that expert alone; the original is removed when nothing reads it any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from graphopt.graph.diagnostics import Rule
from graphopt.graph.weights import (
    Expression,
    Reshape,
    Slice,
    Transpose,
    WeightTensor,
    expression_of,
    new_weight,
    weight_of,
)

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.passes.context import Ledger

Layout = Callable[[Expression], Expression]
"""Makes an expression that rearranges the numbers of another, or takes a part of them."""

_Shape = tuple[int, ...]
_Edits = list[tuple[str, Layout]] | None

STORED_AS_READ = Rule("canonicalize.stored-as-read", "{weight}, or a part of it, stored as it is read")


def store_layouts(model: ir.Model, ledger: Ledger) -> None:
    """Store every weight in the layout it is read in, and drop the nodes that made it so."""
    graph = model.graph
    weights: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        weight = weight_of(node, 0)
        if node.op_type not in _LAYOUTS or weight is None or any(output.is_graph_output() for output in node.outputs):
            continue
        assert weight.const_value is not None
        if not weight.const_value.dtype.is_floating_point():
            continue
        edits = _LAYOUTS[node.op_type](node, tuple(weight.const_value.shape.numpy()))
        if edits is None:
            continue
        original, expression = weights.get(weight, weight), expression_of(weight.const_value)
        node.replace_input_with(0, None)
        if not weight.uses() and not weight.is_graph_output():
            # Before the new weight is made, which may have the same name.
            del graph.initializers[weight.name or ""]
        for output, (suffix, layout) in zip(node.outputs, edits, strict=True):
            new_value = new_weight(graph, f"{weight.name}{suffix}", WeightTensor(layout(expression)))
            output.replace_all_uses_with(new_value)
            weights[new_value] = original
        graph.remove(node, safe=True)
    for new_value, original in weights.items():
        if new_value.uses():
            ledger.changed(new_value, STORED_AS_READ(weight=original.name), [original])


def _constants(node: ir.Node, index: int) -> list[int] | None:
    """Return the integers of input ``index``: none where it is absent, ``None`` where it is computed at run time."""
    if index >= len(node.inputs) or node.inputs[index] is None:
        return []
    value = weight_of(node, index)
    return None if value is None or value.const_value is None else value.const_value.numpy().reshape(-1).tolist()


def _transpose(node: ir.Node, shape: _Shape) -> _Edits:
    permutation = tuple(node.attributes.get_ints("perm", ())) or tuple(reversed(range(len(shape))))
    return [(".transposed", lambda expression: Transpose(expression, permutation))]


def _split(node: ir.Node, shape: _Shape) -> _Edits:
    axis, parts = node.attributes.get_int("axis", 0) % len(shape), len(node.outputs)
    sizes = _constants(node, 1)
    if sizes is None:
        return None
    # Equal parts; where they do not fit, the last is smaller.
    starts = np.cumsum([0, *sizes]) if sizes else np.arange(parts + 1) * math.ceil(shape[axis] / parts)
    return [(f".{part}", _cut({axis: slice(*starts[part : part + 2].tolist())})) for part in range(parts)]


def _slice(node: ir.Node, shape: _Shape) -> _Edits:
    starts, ends, axes, steps = (_constants(node, index) for index in (1, 2, 3, 4))
    if starts is None or ends is None or axes is None or steps is None:
        return None
    axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    pieces = zip(axes, starts, ends, steps, strict=True)
    return [(".part", _cut({axis % len(shape): slice(*piece) for axis, *piece in pieces}))]


def _gather(node: ir.Node, shape: _Shape) -> _Edits:
    axis, index = node.attributes.get_int("axis", 0) % len(shape), weight_of(node, 1)
    if index is None or index.const_value is None or len(index.const_value.shape) != 0:
        return None
    number = int(index.const_value.numpy())
    return [(f".{number}", _cut({axis: number}))]


def _cut(pieces: dict[int, slice | int]) -> Layout:
    numbers = {axis: slice(piece, piece + 1 or None) for axis, piece in pieces.items() if isinstance(piece, int)}
    slices = {axis: piece for axis, piece in pieces.items() if isinstance(piece, slice)}

    def layout(expression: Expression) -> Expression:
        cut = Slice.cut(expression, {**slices, **numbers})
        sizes = [size for axis, size in enumerate(cut.shape) if axis not in numbers]
        return Reshape.to_dims(cut, sizes) if numbers else cut

    return layout


def _squeeze(node: ir.Node, shape: _Shape) -> _Edits:
    axes = _constants(node, 1)
    if axes is None:
        return None
    gone_axes = {axis % len(shape) for axis in axes} if axes else {axis for axis, size in enumerate(shape) if size == 1}
    return _reshape_to([size for axis, size in enumerate(shape) if axis not in gone_axes])


def _unsqueeze(node: ir.Node, shape: _Shape) -> _Edits:
    axes = _constants(node, 1)
    if axes is None:
        return None
    new = {axis % (len(shape) + len(axes)) for axis in axes}
    sizes = iter(shape)
    return _reshape_to([1 if axis in new else next(sizes) for axis in range(len(shape) + len(axes))])


def _reshape(node: ir.Node, shape: _Shape) -> _Edits:
    target = _constants(node, 1)
    if target is None:
        return None
    if not node.attributes.get_int("allowzero", 0):
        target = [size or shape[axis] for axis, size in enumerate(target)]
    return _reshape_to(target)


def _reshape_to(dims: list[int]) -> _Edits:
    return [("", lambda expression: Reshape.to_dims(expression, dims))]


_LAYOUTS: dict[str, Callable[[ir.Node, _Shape], _Edits]] = {
    "Transpose": _transpose,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Reshape": _reshape,
}
