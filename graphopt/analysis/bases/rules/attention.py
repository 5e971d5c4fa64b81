"""``Attention`` and ``RotaryEmbedding``, opset 23 and later, and ``LinearRecurrence``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.analysis.bases.pins import (
    HEAD_BY_HEAD,
    HEAD_SIZE_UNKNOWN,
    POSITION_BY_POSITION,
    ROTARY_ANGLES,
    SOFTMAX,
    WEIGHS_VALUES,
)
from graphopt.analysis.bases.rules.common import has_ranks, is_floating, observe, pin_node, rank
from graphopt.runtime_ops import schema_of

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.analysis.bases.axes import Axis, BasisGraph, Role, Side

_MASK, _PAST_KEY, _PAST_VALUE = 3, 4, 5
_PRESENT_KEY, _PRESENT_VALUE, _SCORES = 1, 2, 3
_HEADS = ("q_num_heads", "kv_num_heads")
_SIDES: tuple[Side, ...] = ("observed", "observed", "made", "made")


def attention(bases: BasisGraph, node: ir.Node) -> None:
    """``softmax(q k^T) v``: (q Q)(k Q)^T = q k^T, and p (v Q) = (p v) Q; per head, the caches included.

    Which head goes with which is fixed, and scores are softmaxed: heads and positions are observed.
    """
    inputs = [*node.inputs, *[None] * 6][:6]
    outputs = [*node.outputs, *[None] * 4][:4]
    tensors = [value for value in (*inputs[:3], outputs[0]) if value is not None and value.shape is not None]
    if len(tensors) < 4 or not _heads_known(node, tensors):
        observe(bases, node)
        return
    query, key, value, y = tensors
    query_heads, key_heads = (node.attributes.get_int(name, 0) for name in _HEADS)
    products = [_head_axis(bases, node, query, query_heads), _head_axis(bases, node, key, key_heads)]
    values = [_head_axis(bases, node, value, key_heads)]
    values.append(_output_axis(bases, node, y, query_heads, bases.width(values[0])))
    products += _cache_axes(bases, node, inputs[_PAST_KEY])
    values += _cache_axes(bases, node, inputs[_PAST_VALUE])
    products += _cache_axes(bases, node, outputs[_PRESENT_KEY])
    values += _cache_axes(bases, node, outputs[_PRESENT_VALUE])
    _join_all(bases, node, products, "query_key")
    _join_all(bases, node, values, "value")
    _pin_scores(bases, node, inputs[_MASK], "observed")
    _pin_scores(bases, node, outputs[_SCORES], "made")


def recurrence(bases: BasisGraph, node: ir.Node) -> None:
    """``S = diag(a) S + b k (v - S^T k)^T``, ``y = S^T q``: with v Q all is S Q and y Q, in every head.

    Keys and queries could be rotated too where all their channels decay alike. Then a state would be in two bases.
    """
    schema = schema_of(node)
    inputs = dict(zip(schema.input_names, node.inputs, strict=False))
    outputs = dict(zip(schema.output_names, node.outputs, strict=False))
    values = [inputs.get("value"), inputs.get("state"), *outputs.values()]
    if len(values) < 4 or not has_ranks(*values) or any(value is None or rank(value) != 4 for value in values):
        observe(bases, node)
        return
    for name in ("query", "key", "decay", "beta"):
        value = inputs[name]
        if value is not None and not value.is_initializer():
            bases.pin_axes(bases.axes(value), node, WEIGHS_VALUES(op=node.op_type), "observed")
    axes = [
        _last_of_four(bases, node, value, side) for value, side in zip(values, _SIDES, strict=True) if value is not None
    ]
    _join_all(bases, node, axes, "value")


def rotary(bases: BasisGraph, node: ir.Node) -> None:
    """``RotaryEmbedding``: each pair of coordinates is turned by an angle of its own."""
    pin_node(bases, node, ROTARY_ANGLES())


def _heads_known(node: ir.Node, values: list[ir.Value]) -> bool:
    flat = any(rank(value) == 3 for value in values)
    return not flat or all(node.attributes.get_int(name, 0) for name in _HEADS)


def _head_axis(bases: BasisGraph, node: ir.Node, value: ir.Value, heads: int) -> Axis:
    """Return the axis of one head: the last of [batch, heads, length, size], or a factor of the last of three."""
    if rank(value) == 4:
        return _last_of_four(bases, node, value, "observed")
    whole = bases.axis(value, 2)
    width = bases.width(whole)
    if width is None or width % heads:
        pin_node(bases, node, HEAD_SIZE_UNKNOWN())
        return whole
    outer, inner = bases.refine("product", whole, (heads, width // heads), node, "observed")
    bases.pin(outer, node, HEAD_BY_HEAD(), "observed")
    return inner


def _output_axis(bases: BasisGraph, node: ir.Node, y: ir.Value, heads: int, width: int | None) -> Axis:
    """Return the axis of one head of the output, of ``width``."""
    if rank(y) == 4:
        return _last_of_four(bases, node, y, "made")
    outer, inner = bases.refine("product", bases.axis(y, 2), (heads, width), node, "made")
    bases.pin(outer, node, HEAD_BY_HEAD(), "made")
    bases.pin(outer, node, HEAD_BY_HEAD(), "observed")
    return inner


def _cache_axes(bases: BasisGraph, node: ir.Node, cache: ir.Value | None) -> list[Axis]:
    if cache is None or cache.shape is None or rank(cache) != 4:
        return []
    return [_last_of_four(bases, node, cache, "observed")]


def _last_of_four(bases: BasisGraph, node: ir.Node, value: ir.Value, side: Side) -> Axis:
    axes = bases.axes(value)
    for axis in axes[:3]:
        bases.pin(axis, node, POSITION_BY_POSITION(), side)
        bases.pin(axis, node, POSITION_BY_POSITION(), "observed")
    return axes[3]


def _join_all(bases: BasisGraph, node: ir.Node, axes: list[Axis], role: Role) -> None:
    bases.mark(axes[0], role)
    for axis in axes[1:]:
        bases.join(axes[0], axis, node)


def _pin_scores(bases: BasisGraph, node: ir.Node, value: ir.Value | None, side: Side) -> None:
    if value is not None and is_floating(value):
        bases.pin_axes(bases.axes(value), node, SOFTMAX(), side)
