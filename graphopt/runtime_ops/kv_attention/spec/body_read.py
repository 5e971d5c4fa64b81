"""The second half of the body of ``KVAttention``: each query reads what the policies let it."""

# onnxscript's builder makes operators by name, so its values have no static type.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime_ops.kv_attention.spec.attributes import DENSE, RETRIEVAL
from graphopt.runtime_ops.kv_attention.spec.body_compensation import Extra, known_part, scaled
from graphopt.runtime_ops.kv_attention.spec.check import MOST_TOKENS

if TYPE_CHECKING:
    from onnxscript import OpBuilder

    from graphopt.runtime_ops.kv_attention.spec.body_append import Call


def heads_apart(call: Call, query: ir.Value) -> ir.Value:
    """Return a query [B, S, H G D] as [B, H, G, S, D]."""
    op = call.op
    shape = op.Concat([0, 0, call.attrs.kv_heads, -1], call.channels, axis=0)
    return op.Transpose(op.Reshape(query, shape), perm=[0, 2, 3, 1, 4])


def read_mask(call: Call, query: ir.Value, summaries: ir.Value, window: ir.Value, policies: ir.Value) -> ir.Value:
    """Return which tokens each query reads, bool [B, 1 or H, S, N]; N = P T places, in the order of physical pages.

    Args:
        call: the call.
        query: float [B, H, G, S, D].
        summaries: float [B, H, P, Z], after the call.
        window: int64 [1], 0 for none.
        policies: int64 [1] or [H].
    """
    op, attrs = call.op, call.attrs
    asked = op.Add(op.Sub(call.total, call.columns), call.range(call.columns))
    p = op.Reshape(asked, [0, 1, -1, 1])
    position = op.Reshape(call.positions(call.pages_held(call.newest_page())), [0, 1, 1, -1])
    reach = op.Where(op.Equal(window, 0), MOST_TOKENS, window)
    visible = op.And(op.LessOrEqual(position, p), op.Greater(position, op.Sub(p, reach)))
    always = op.Or(op.Less(position, attrs.sinks), op.Greater(position, op.Sub(p, attrs.recent)))
    if attrs.retrieves and attrs.chooses:
        chosen = _chosen_pages(call, query, summaries, p, reach)
        each = op.Expand(op.Unsqueeze(chosen, [-1]), [1, 1, 1, 1, attrs.page])
        chosen = op.And(op.Reshape(each, [0, 0, 0, -1]), _heads_with(op, policies, RETRIEVAL))
        always = op.Or(always, chosen)
    return op.And(visible, op.Or(always, _heads_with(op, policies, DENSE)))


def _heads_with(op: OpBuilder, policies: ir.Value, policy: int) -> ir.Value:
    return op.Reshape(op.Equal(policies, policy), [-1, 1, 1])


def _chosen_pages(call: Call, query: ir.Value, summaries: ir.Value, p: ir.Value, reach: ir.Value) -> ir.Value:
    """Return which pages each KV head chooses for each query, bool [B, H, S, P]. Such a cache never wraps."""
    op, attrs = call.op, call.attrs
    known = op.Unsqueeze(op.Transpose(known_part(call, summaries), perm=[0, 1, 3, 2]), [2])  # B, H, 1, Z, P
    query = _largest_channels(call, query) if attrs.channels else query
    if attrs.summary == "bounds":
        # max(q min, q max) is q max where q > 0, else q min
        low, high = op.Split(known, axis=3, num_outputs=2, _outputs=2)
        scores = op.Add(op.MatMul(op.Max(query, 0.0), high), op.MatMul(op.Min(query, 0.0), low))
    else:
        scores = op.MatMul(query, known)
    best = op.ReduceMax(op.Where(op.IsNaN(scores), math.inf, scores), [2], keepdims=0)
    begin = op.Mul(call.range(call.pages), attrs.page)
    end = op.Add(begin, attrs.page - 1)
    lowest = op.Max(op.Max(begin, attrs.sinks), op.Add(op.Sub(p, reach), 1))
    is_candidate = op.LessOrEqual(lowest, op.Min(end, op.Sub(p, attrs.recent)))  # B, 1, S, P
    count = op.Min(call.pages, attrs.budget) if attrs.budget else call.pages
    _, places = op.TopK(op.Where(is_candidate, best, -math.inf), count, _outputs=2)
    marked = op.Expand(1.0, op.Shape(places))
    if 0 < attrs.mass < 1:
        weights = op.Where(is_candidate, _page_weights(call, best, is_candidate), 0.0)
        needed = op.Mul(op.ReduceSum(weights, [-1], keepdims=1), attrs.mass)
        before = op.CumSum(op.GatherElements(weights, places, axis=-1), -1, exclusive=1)
        marked = op.Cast(op.Less(before, needed), to=ir.DataType.FLOAT)
    marks = op.ScatterElements(op.Expand(0.0, op.Shape(best)), places, marked, axis=-1)
    return op.And(op.Greater(marks, 0.5), is_candidate)


def _largest_channels(call: Call, query: ir.Value) -> ir.Value:
    """Return the query [B, H, G, S, D] with 0 in all but the channels that are largest for the G heads together."""
    op = call.op
    sums = op.ReduceSum(op.Abs(query), [2], keepdims=1)
    sums = op.Where(op.IsNaN(sums), math.inf, sums)
    _, places = op.TopK(sums, op.Min(call.channels, call.attrs.channels), _outputs=2)
    nothing = op.Expand(0.0, op.Shape(sums))
    marks = op.ScatterElements(nothing, places, op.Expand(1.0, op.Shape(places)), axis=-1)
    return op.Where(op.Greater(marks, 0.5), query, 0.0)


def _page_weights(call: Call, scores: ir.Value, is_candidate: ir.Value) -> ir.Value:
    """Return exp(scale (score - the highest of the candidates)), 1 for the highest itself, [B, H, S, P]."""
    op = call.op
    highest = op.ReduceMax(op.Where(is_candidate, scores, -math.inf), [-1], keepdims=1)
    weights = op.Exp(op.Min(op.Mul(op.Sub(scores, highest), call.attrs.scale), 0.0))
    # the difference of two infinite scores is NaN
    weights = op.Where(op.IsNaN(weights), 0.0, weights)
    return op.Where(op.Equal(scores, highest), 1.0, weights)


def attend(
    call: Call,
    query: ir.Value,
    first_query: ir.Value | None,
    K: ir.Value,
    V: ir.Value,
    is_read: ir.Value,
    sink_logits: ir.Value,
    extra: Extra | None,
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
        extra: one token more for each query.
    """
    op, attrs = call.op, call.attrs
    bad_keys, bad_values = (op.IsNaN(op.Mul(each, 0.0)) for each in (K, V))
    # a weight of 0 times a value that is not finite would make NaN
    clean_keys, clean_values = op.Where(bad_keys, 0.0, K), op.Where(bad_values, 0.0, V)
    turned = op.Unsqueeze(op.Transpose(clean_keys, perm=[0, 1, 3, 2]), [2])
    if first_query is None:
        scores = op.MatMul(query, turned)
    else:
        sinks, rest = op.Slice(turned, [0], [attrs.sinks], [-1]), op.Slice(turned, [attrs.sinks], [2**62], [-1])
        scores = op.Concat(op.MatMul(first_query, sinks), op.MatMul(query, rest), axis=-1)
    scores = op.Where(op.Unsqueeze(is_read, [2]), scaled(call, scores), -math.inf)
    columns = [] if extra is None else [extra.score]
    every = op.Concat(scores, *columns, _sink_column(call, query, sink_logits), axis=-1)
    weights = op.Softmax(every, axis=-1)
    y = op.MatMul(op.Slice(weights, [0], [-1 - len(columns)], [-1]), op.Unsqueeze(clean_values, [2]))
    if extra is not None:
        y = op.Add(y, op.Mul(op.Slice(weights, [-2], [-1], [-1]), op.Unsqueeze(extra.value, [2])))
        y = op.Where(extra.is_bad, math.nan, y)
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
