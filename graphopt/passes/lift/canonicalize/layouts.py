"""Weights that only change their layout on the way to what reads them are stored as they are read.

    MatMul(x, Transpose(W))                                ->   MatMul(x, W.transposed)
    MatMul(x, Squeeze(Split(stack; axis=0)[e], [0]))       ->   MatMul(x, stack.e)

So a weight is seen as a weight: a tied head, and each expert of a mixture (Shazeer et al. 2017), which exporters keep
in stacks [experts, rows, columns]. Nothing is read here. What is stored is a view of the original, so that writing an
expert copies that expert alone; the original goes once nobody reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from graphopt.passes.context import Ledger
from graphopt.weights import Weight, lazy, new_weight, weight_of

Layout = Callable[[Weight], Weight]
"""Gives a view of an array, or a copy where NumPy has no view for it."""

_Shape = tuple[int, ...]
_Found = list[tuple[str, Layout]] | None


def store_layouts(model: ir.Model, ledger: Ledger) -> None:
    """Store every weight in the layout it is read in, and drop the nodes that made it so."""
    graph = model.graph
    views: dict[ir.Value, tuple[ir.Value, Layout]] = {}
    for node in list(graph):
        weight = weight_of(node, 0)
        if node.op_type not in _LAYOUTS or weight is None or any(output.is_graph_output() for output in node.outputs):
            continue
        assert weight.const_value is not None
        if not weight.const_value.dtype.is_floating_point():
            continue
        found = _LAYOUTS[node.op_type](node, tuple(weight.const_value.shape.numpy()))
        if found is None:
            continue
        # Views are composed on the original and copied last: a transposed stack is not copied once per expert.
        original, before = views.get(weight, (weight, _as_it_is))
        node.replace_input_with(0, None)
        if not weight.uses() and not weight.is_graph_output():
            # First, so that what keeps its contents may keep its name.
            del graph.initializers[weight.name or ""]
        for output, (suffix, layout) in zip(node.outputs, found, strict=True):
            composed = _composed(before, layout)
            stored = new_weight(graph, f"{weight.name}{suffix}", _view(original, composed))
            output.replace_all_uses_with(stored)
            views[stored] = original, composed
        graph.remove(node, safe=True)
    for stored, (original, _) in views.items():
        if stored.uses():
            ledger.changed(stored, f"{original.name}, or a part of it, stored as it is read", [original])


def _as_it_is(array: Weight) -> Weight:
    return array


def _composed(before: Layout, after: Layout) -> Layout:
    return lambda array: after(before(array))


def _view(original: ir.Value, layout: Layout) -> ir.LazyTensor:
    source = original.const_value
    assert source is not None
    # An array of one element, repeated: it has the shape and no size.
    shape = layout(np.broadcast_to(np.zeros((), source.dtype.numpy()), source.shape.numpy())).shape
    return lazy(lambda: layout(source.numpy()), source.dtype, shape)


def _constants(node: ir.Node, index: int) -> list[int] | None:
    """Return the integers of input ``index``: none where it is absent, ``None`` where it is computed at run time."""
    if index >= len(node.inputs) or node.inputs[index] is None:
        return []
    value = weight_of(node, index)
    return None if value is None or value.const_value is None else value.const_value.numpy().reshape(-1).tolist()


def _transpose(node: ir.Node, shape: _Shape) -> _Found:
    permutation = tuple(node.attributes.get_ints("perm", ())) or tuple(reversed(range(len(shape))))
    return [(".transposed", lambda array: array.transpose(permutation))]


def _split(node: ir.Node, shape: _Shape) -> _Found:
    axis, parts = node.attributes.get_int("axis", 0) % len(shape), len(node.outputs)
    sizes = _constants(node, 1)
    if sizes is None:
        return None
    # Equal parts; where they do not fit, the last is smaller.
    starts = np.cumsum([0, *sizes]) if sizes else np.arange(parts + 1) * math.ceil(shape[axis] / parts)
    return [(f".{part}", _cut({axis: slice(*starts[part : part + 2].tolist())})) for part in range(parts)]


def _slice(node: ir.Node, shape: _Shape) -> _Found:
    starts, ends, axes, steps = (_constants(node, index) for index in (1, 2, 3, 4))
    if starts is None or ends is None or axes is None or steps is None:
        return None
    axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    pieces = zip(axes, starts, ends, steps, strict=True)
    return [(".part", _cut({axis % len(shape): slice(*piece) for axis, *piece in pieces}))]


def _gather(node: ir.Node, shape: _Shape) -> _Found:
    axis, index = node.attributes.get_int("axis", 0) % len(shape), weight_of(node, 1)
    if index is None or index.const_value is None or len(index.const_value.shape) != 0:
        return None
    number = int(index.const_value.numpy())
    return [(f".{number}", _cut({axis: number}))]


def _cut(pieces: dict[int, slice | int]) -> Layout:
    return lambda array: array[tuple(pieces.get(axis, slice(None)) for axis in range(array.ndim))]


def _squeeze(node: ir.Node, shape: _Shape) -> _Found:
    axes = _constants(node, 1)
    return None if axes is None else [("", lambda array: np.squeeze(array, tuple(axes) or None))]


def _unsqueeze(node: ir.Node, shape: _Shape) -> _Found:
    axes = _constants(node, 1)
    return None if axes is None else [("", lambda array: np.expand_dims(array, tuple(axes)))]


def _reshape(node: ir.Node, shape: _Shape) -> _Found:
    target = _constants(node, 1)
    if target is None:
        return None
    if not node.attributes.get_int("allowzero", 0):
        target = [size or shape[axis] for axis, size in enumerate(target)]
    return [("", lambda array: array.reshape(target))]


_LAYOUTS: dict[str, Callable[[ir.Node, _Shape], _Found]] = {
    "Transpose": _transpose,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Reshape": _reshape,
}
