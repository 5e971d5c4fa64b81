"""The second half of the body of ``KVAttention``: each query reads what the policies let it."""

# onnxscript's builder makes operators by name, so its values have no static type.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math

import onnx_ir as ir

from graphopt.runtime_ops.kv_attention.attributes import DENSE, RETRIEVAL
from graphopt.runtime_ops.kv_attention.body_append import Call


def heads_apart(call: Call, query: ir.Value) -> ir.Value:
    """Return a query [B, S, H G D] as [B, H, G, S, D]."""
    op = call.op
    shape = op.Concat([0, 0, call.attrs.kv_heads, -1], call.channels, axis=0)
    return op.Transpose(op.Reshape(query, shape), perm=[0, 2, 3, 1, 4])


def read_mask(call: Call, query: ir.Value, summaries: ir.Value) -> ir.Value:
    """Return which tokens each query reads, bool [B, 1 or H, S, N]; N = P T places, in the order of physical pages.

    Args:
        call: the call.
        query: float [B, H, G, S, D].
        summaries: float [B, H, P, Z], after the call.
    """
    op, attrs = call.op, call.attrs
    asked = op.Add(op.Sub(call.total, call.columns), call.range(call.columns))
    p = op.Reshape(asked, [0, 1, -1, 1])
    position = op.Reshape(call.positions(call.pages_held(call.newest_page())), [0, 1, 1, -1])
    visible = op.LessOrEqual(position, p)
    if attrs.window:
        visible = op.And(visible, op.Greater(position, op.Sub(p, attrs.window)))
    if set(attrs.policies) == {DENSE}:
        return visible
    always = op.Or(op.Less(position, attrs.sinks), op.Greater(position, op.Sub(p, attrs.recent)))
    if attrs.retrieves and attrs.budget:
        chosen = _chosen_pages(call, query, summaries, p)
        each = op.Expand(op.Unsqueeze(chosen, [-1]), [1, 1, 1, 1, attrs.page])
        chosen = op.Reshape(each, [0, 0, 0, -1])
        if set(attrs.policies) != {RETRIEVAL}:
            chosen = op.And(chosen, _heads_with(call, RETRIEVAL))
        always = op.Or(always, chosen)
    if DENSE in attrs.policies:
        always = op.Or(always, _heads_with(call, DENSE))
    return op.And(visible, always)


def _heads_with(call: Call, policy: int) -> ir.Value:
    op, attrs = call.op, call.attrs
    flags = [int(attrs.policy(head) == policy) for head in range(attrs.kv_heads)]
    return op.Reshape(op.Greater(op.Identity(flags), 0), [-1, 1, 1])


def _chosen_pages(call: Call, query: ir.Value, summaries: ir.Value, p: ir.Value) -> ir.Value:
    """Return which pages each KV head chooses for each query, bool [B, H, S, P]. Such a cache never wraps."""
    op, attrs = call.op, call.attrs
    known = op.Unsqueeze(op.Transpose(summaries, perm=[0, 1, 3, 2]), [2])  # B, H, 1, Z, P
    if attrs.summary == "bounds":
        # max(q min, q max) is q max where q > 0, else q min
        low, high = op.Split(known, axis=3, num_outputs=2, _outputs=2)
        scores = op.Add(op.MatMul(op.Max(query, 0.0), high), op.MatMul(op.Min(query, 0.0), low))
    else:
        scores = op.MatMul(query, known)
    best = op.ReduceMax(op.Where(op.IsNaN(scores), math.inf, scores), [2], keepdims=0)
    begin = op.Mul(call.range(call.pages), attrs.page)
    end = op.Add(begin, attrs.page - 1)
    lowest = op.Max(begin, attrs.sinks)
    if attrs.window:
        lowest = op.Max(lowest, op.Sub(p, attrs.window - 1))
    is_candidate = op.LessOrEqual(lowest, op.Min(end, op.Sub(p, attrs.recent)))  # B, 1, S, P
    count = op.Min(call.pages, attrs.budget)
    _, places = op.TopK(op.Where(is_candidate, best, -math.inf), count, _outputs=2)
    nothing = op.Expand(0.0, op.Shape(best))
    marks = op.ScatterElements(nothing, places, op.Expand(1.0, op.Shape(places)), axis=-1)
    return op.And(op.Greater(marks, 0.5), is_candidate)


def attend(
    call: Call,
    query: ir.Value,
    first_query: ir.Value | None,
    K: ir.Value,
    V: ir.Value,
    is_read: ir.Value,
    sink_logits: ir.Value,
) -> ir.Value:
    """Return y [B, H, G, S, D]; NaN for a column that reads nothing.

    Args:
        call: the call.
        query: float [B, H, G, S, D].
        first_query: the same for tokens below ``sinks``: these are the first places, as pages of sinks never move.
        K: float [B, H, N, D].
        V: float [B, H, N, D].
        is_read: bool [B, 1 or H, S, N].
        sink_logits: float [H G], or [0].
    """
    op, attrs = call.op, call.attrs
    bad_keys, bad_values = (op.IsNaN(op.Mul(each, 0.0)) for each in (K, V))
    # a weight of 0 for what is not finite would make NaN
    clean_keys, clean_values = op.Where(bad_keys, 0.0, K), op.Where(bad_values, 0.0, V)
    turned = op.Unsqueeze(op.Transpose(clean_keys, perm=[0, 1, 3, 2]), [2])
    if first_query is None:
        scores = op.MatMul(query, turned)
    else:
        sinks, rest = op.Slice(turned, [0], [attrs.sinks], [-1]), op.Slice(turned, [attrs.sinks], [2**62], [-1])
        scores = op.Concat(op.MatMul(first_query, sinks), op.MatMul(query, rest), axis=-1)
    scores = op.Mul(scores, attrs.scale)
    if attrs.softcap:
        scores = op.Mul(op.Tanh(op.Div(scores, attrs.softcap)), attrs.softcap)
    scores = op.Where(op.Unsqueeze(is_read, [2]), scores, -math.inf)
    every = op.Concat(scores, _sink_column(call, query, sink_logits), axis=-1)
    weights = op.Slice(op.Softmax(every, axis=-1), [0], [-1], [-1])
    y = op.MatMul(weights, op.Unsqueeze(clean_values, [2]))
    bad = op.Or(op.Cast(op.ReduceMax(op.Cast(bad_keys, to=ir.DataType.UINT8), [-1]), to=ir.DataType.BOOL), bad_values)
    reads = op.MatMul(op.Cast(is_read, to=ir.DataType.FLOAT), op.Cast(bad, to=ir.DataType.FLOAT))
    return op.Where(op.Unsqueeze(op.Greater(reads, 0.5), [2]), math.nan, y)


def _sink_column(call: Call, query: ir.Value, sink_logits: ir.Value) -> ir.Value:
    """Return the logits of the sinks as a column of the scores [B, H, G, S, 1]; -inf where there are none."""
    op, attrs = call.op, call.attrs
    group = op.Shape(query, start=2, end=3)
    heads = op.Mul(group, attrs.kv_heads)
    absent = op.Expand(-math.inf, op.Sub(heads, op.Shape(sink_logits)))
    logits = op.Reshape(op.Concat(sink_logits, absent, axis=0), [1, attrs.kv_heads, -1, 1, 1])
    column = op.Concat(op.Shape(query, start=0, end=4), [1], axis=0)
    return op.Expand(logits, column)
