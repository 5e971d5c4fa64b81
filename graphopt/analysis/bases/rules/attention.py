"""``Attention`` and ``RotaryEmbedding``, opset 23 and later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.analysis.bases.pins import HEAD_BY_HEAD, HEAD_SIZE_UNKNOWN, POSITION_BY_POSITION, SOFTMAX, TURNED
from graphopt.analysis.bases.rules.common import observe, pin_all, rank, ranked

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.analysis.bases.axes import Axis, BasisGraph

_QUERY, _KEY, _VALUE, _MASK, _PAST_KEY, _PAST_VALUE = range(6)


def attention(found: BasisGraph, node: ir.Node) -> None:
    """``softmax(q k^T) v``: (q Q)(k Q)^T = q k^T, and p (v Q) = (p v) Q; per head, the caches included.

    Which head goes with which is fixed, and scores are softmaxed: heads and positions are observed.
    """
    inputs = [*node.inputs, *[None] * 6][:6]
    outputs = [*node.outputs, *[None] * 4][:4]
    query, key, value = inputs[:3]
    if not ranked(query, key, value, outputs[0]) or not _heads_known(node, [query, key, value, outputs[0]]):
        observe(found, node)
        return
    assert query is not None and key is not None and value is not None and outputs[0] is not None
    query_heads, key_heads = (node.attributes.get_int(f"{which}_num_heads", 0) for which in ("q", "kv"))
    contracted = [_head_axis(found, node, query, query_heads), _head_axis(found, node, key, key_heads)]
    passed = [_head_axis(found, node, value, key_heads)]
    made = outputs[0]
    if rank(made) == 4:
        passed.append(_split_off(found, node, made, "made"))
    else:
        width = found.graph.nodes[passed[0]]["width"]
        parts = found.refine("product", found.axis(made, 2), (query_heads, width), node, "made")
        found.pin(parts[0], node.name or "", HEAD_BY_HEAD(), "made")
        found.pin(parts[0], node.name or "", HEAD_BY_HEAD(), "observed")
        passed.append(parts[1])
    for cache, shared in (
        (inputs[_PAST_KEY], contracted),
        (inputs[_PAST_VALUE], passed),
        (outputs[1], contracted),
        (outputs[2], passed),
    ):
        if cache is not None and ranked(cache) and rank(cache) == 4:
            shared.append(_split_off(found, node, cache, "observed"))
    for shared, role in ((contracted, "query_key"), (passed, "value")):
        found.mark(shared[0], role)  # type: ignore[arg-type]
        for axis in shared[1:]:
            found.join(shared[0], axis, node)
    for extra, side in ((inputs[_MASK], "observed"), (outputs[3], "made")):
        if extra is not None and (extra.dtype is None or extra.dtype.is_floating_point()):
            for axis in found.axes(extra):
                found.pin(axis, node.name or "", SOFTMAX(), side)  # type: ignore[arg-type]


def rotary(found: BasisGraph, node: ir.Node) -> None:
    """``RotaryEmbedding``: each pair of coordinates is turned by an angle of its own."""
    pin_all(found, node, TURNED())


def _heads_known(node: ir.Node, values: list[ir.Value | None]) -> bool:
    flat = any(value is not None and rank(value) == 3 for value in values)
    return not flat or all(node.attributes.get_int(f"{which}_num_heads", 0) for which in ("q", "kv"))


def _head_axis(found: BasisGraph, node: ir.Node, value: ir.Value, heads: int) -> Axis:
    """Return the axis of one head: the last of [batch, heads, length, size], or a factor of the last of three."""
    if rank(value) == 4:
        return _split_off(found, node, value, "observed")
    whole = found.axis(value, 2)
    width = found.graph.nodes[whole]["width"]
    if width is None or width % heads:
        pin_all(found, node, HEAD_SIZE_UNKNOWN())
        return whole
    outer, inner = found.refine("product", whole, (heads, width // heads), node, "observed")
    found.pin(outer, node.name or "", HEAD_BY_HEAD(), "observed")
    return inner


def _split_off(found: BasisGraph, node: ir.Node, value: ir.Value, side: str) -> Axis:
    axes = found.axes(value)
    for axis in axes[:3]:
        found.pin(axis, node.name or "", POSITION_BY_POSITION(), side)  # type: ignore[arg-type]
        found.pin(axis, node.name or "", POSITION_BY_POSITION(), "observed")
    return axes[3]
