"""The second half of the body of ``KVAttention``: each query reads what the policies let it."""

# onnxscript's builder makes operators by name, so its values have no static type.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime_ops.kv_attention.spec.body_append import heads_with
from graphopt.runtime_ops.kv_attention.spec.body_compensation import Extra, known_part, scale_scores
from graphopt.runtime_ops.kv_attention.spec.check import MOST_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphopt.runtime_ops.kv_attention.spec.body_append import Call


def heads_apart(call: Call, query: ir.Value) -> ir.Value:
    """Return a query [B, S, H G D] as [B, H, G, S, D]."""
    op = call.op
    shape = op.Concat([0, 0, call.attrs.kv_heads, -1], call.channels, axis=0)
    return op.Transpose(op.Reshape(query, shape), perm=[0, 2, 3, 1, 4])


def read_mask(
    call: Call,
    query: ir.Value,
    summaries: ir.Value,
    window: ir.Value,
    policies: ir.Value,
    weights: Callable[[ir.Value], ir.Value],
) -> ir.Value:
    """Return which tokens each query reads, bool [B, 1 or H, S, N]; N = P T places, in the order of physical pages.

    Args:
        call: the call.
        query: float [B, H, G, S, D].
        summaries: float [B, H, P, Z], after the call.
        window: int64 [1], 0 for none.
        policies: int64 [1] or [H].
        weights: writes the weights of dense attention to tokens bool [B, 1, S, N], float [B, H, G, S, N].
    """
    op, attrs = call.op, call.attrs
    query_positions = op.Add(op.Sub(call.total, call.columns), call.range(call.columns))
    p = op.Reshape(query_positions, [0, 1, -1, 1])
    position = op.Reshape(call.positions(call.pages_held(call.newest_page())), [0, 1, 1, -1])
    no_chunks = op.Where(op.Equal(window, 0), MOST_TOKENS, window)
    reach = op.Add(op.Mod(p, window), 1) if attrs.chunks else no_chunks
    visible = op.And(op.LessOrEqual(position, p), op.Greater(position, op.Sub(p, reach)))
    always = op.Or(op.Less(position, attrs.sinks), op.Greater(position, op.Sub(p, attrs.recent)))
    left_out = []
    for policy in attrs.policies_in_use:
        if policy.in_blocks and policy.chooses:
            has_policy = op.Reshape(op.Equal(policies, policy.number), [-1, 1, 1])
            block_mask = policy.write_block_mask(call, weights(visible), visible, p, position)
            left_out.append(op.And(has_policy, op.Not(block_mask)))
        elif policy.chooses:
            pages = policy.write_pages(call, query, known_part(call, summaries), p, reach)
            tokens = op.Expand(op.Unsqueeze(pages, [-1]), [1, 1, 1, 1, attrs.page])
            tokens = op.Reshape(tokens, [0, 0, 0, -1])
            has_policy = op.Reshape(op.Equal(policies, policy.number), [-1, 1, 1])
            always = op.Or(always, op.And(tokens, has_policy))
    reads_all = heads_with(op, policies, lambda policy: policy.reads_all)
    is_read = op.And(visible, op.Or(always, op.Reshape(reads_all, [-1, 1, 1])))
    return reduce(lambda mask, tokens: op.And(mask, op.Not(tokens)), left_out, is_read)


def multiply_keys(call: Call, query: ir.Value, first_query: ir.Value | None, keys: ir.Value) -> ir.Value:
    """Return q . k of all tokens, float [B, H, G, S, N]; arguments as of :func:`attend`."""
    op, attrs = call.op, call.attrs
    keys = op.Unsqueeze(op.Transpose(keys, perm=[0, 1, 3, 2]), [2])
    if first_query is None:
        return op.MatMul(query, keys)
    sinks, other_keys = op.Slice(keys, [0], [attrs.sinks], [-1]), op.Slice(keys, [attrs.sinks], [2**62], [-1])
    return op.Concat(op.MatMul(first_query, sinks), op.MatMul(query, other_keys), axis=-1)


def dense_weights(
    call: Call, query: ir.Value, first_query: ir.Value | None, K: ir.Value, sink_logits: ir.Value, visible: ir.Value
) -> ir.Value:
    """Return the weights of dense attention, float [B, H, G, S, N]; NaN where a query reads a score that is not finite.

    Args:
        call: the call.
        query: as of :func:`attend`.
        first_query: as of :func:`attend`.
        K: as of :func:`attend`.
        sink_logits: as of :func:`attend`.
        visible: bool [B, 1, S, N].
    """
    op = call.op
    products = multiply_keys(call, query, first_query, K)
    products = op.Add(products, op.Mul(products, 0.0))  # NaN where it is not finite, also under a softcap
    scores = op.Where(op.Unsqueeze(visible, [2]), scale_scores(call, products), -math.inf)
    weights = op.Softmax(op.Concat(scores, _sink_column(call, query, sink_logits), axis=-1), axis=-1)
    return op.Slice(weights, [0], [-1], [-1])


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
    op = call.op
    bad_keys, bad_values = (op.IsNaN(op.Mul(tensor, 0.0)) for tensor in (K, V))
    # a weight of 0 times a value that is not finite would make NaN
    clean_keys, clean_values = op.Where(bad_keys, 0.0, K), op.Where(bad_values, 0.0, V)
    scores = scale_scores(call, multiply_keys(call, query, first_query, clean_keys))
    if call.attrs.slopes:
        scores = op.Add(scores, _biases(call))
    scores = op.Where(op.Unsqueeze(is_read, [2]), scores, -math.inf)
    columns = [] if extra is None else [extra.score]
    logits = op.Concat(scores, *columns, _sink_column(call, query, sink_logits), axis=-1)
    weights = op.Softmax(logits, axis=-1)
    y = op.MatMul(op.Slice(weights, [0], [-1 - len(columns)], [-1]), op.Unsqueeze(clean_values, [2]))
    if extra is not None:
        y = op.Add(y, op.Mul(op.Slice(weights, [-2], [-1], [-1]), op.Unsqueeze(extra.value, [2])))
        y = op.Where(extra.is_bad, math.nan, y)
    bad = op.Or(op.Cast(op.ReduceMax(op.Cast(bad_keys, to=ir.DataType.UINT8), [-1]), to=ir.DataType.BOOL), bad_values)
    reads = op.MatMul(op.Cast(is_read, to=ir.DataType.FLOAT), op.Cast(bad, to=ir.DataType.FLOAT))
    return op.Where(op.Unsqueeze(op.Greater(reads, 0.5), [2]), math.nan, y)


def _biases(call: Call) -> ir.Value:
    """Return slope (j - p) of all tokens, float [B, H, G, S, N]."""
    op, attrs = call.op, call.attrs
    query_positions = op.Add(op.Sub(call.total, call.columns), call.range(call.columns))
    p = op.Reshape(query_positions, [0, 1, 1, -1, 1])
    position = op.Reshape(call.positions(call.pages_held(call.newest_page())), [0, 1, 1, 1, -1])
    distance = op.Cast(op.Sub(position, p), to=ir.DataType.FLOAT)
    slopes = op.Constant(value_floats=ir.RefAttr("value_floats", "slopes", ir.AttributeType.FLOATS))
    return op.Mul(op.Reshape(slopes, [1, attrs.kv_heads, -1, 1, 1]), distance)


def _sink_column(call: Call, query: ir.Value, sink_logits: ir.Value) -> ir.Value:
    """Return the logits of the sinks as a column of the scores [B, H, G, S, 1]; -inf where there are none."""
    op, attrs = call.op, call.attrs
    group = op.Shape(query, start=2, end=3)
    heads = op.Mul(group, attrs.kv_heads)
    absent = op.Expand(-math.inf, op.Sub(heads, op.Shape(sink_logits)))
    logits = op.Reshape(op.Concat(sink_logits, absent, axis=0), [1, attrs.kv_heads, -1, 1, 1])
    column = op.Concat(op.Shape(query, start=0, end=4), [1], axis=0)
    return op.Expand(logits, column)
