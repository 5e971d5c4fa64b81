"""The token that replaces those that streaming dropped, in the body of ``KVAttention``: see ``compensation.py``."""

# onnxscript's builder makes operators by name, so its values have no static type.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.runtime_ops.kv_attention.spec.body_append import Call, by_page, heads_with

_END = 2**62


@dataclass(frozen=True)
class Extra:
    """One token more for each query.

    Attributes:
        score: float [B, H, G, S, 1], -inf where there is none.
        value: float [B, H, S, D]; 0 where there is none, or where it is not finite.
        is_bad: bool [B, H, 1, S, D], channels of y that its key or value spoils.
    """

    score: ir.Value
    value: ir.Value
    is_bad: ir.Value


def append_means(call: Call, summaries: ir.Value, key: ir.Value, value: ir.Value) -> ir.Value:
    """Return the summaries [B, H, P, Z] after the call, whose last 2 D numbers are means of all tokens so far."""
    op, attrs = call.op, call.attrs
    summary, means = _split(call, summaries)
    first = op.Div(call.past, attrs.page)
    page_count = op.Add(op.Div(op.Add(call.columns, attrs.page - 2), attrs.page), 1)
    new_pages = op.Add(first, call.range(page_count))
    positions = call.positions(new_pages)
    is_no_sink = op.GreaterOrEqual(op.Reshape(positions, [0, -1, 1, attrs.page, 1]), attrs.sinks)
    keys, is_new = call.new_tokens(key, positions)  # B, n, H, T, D
    values, _ = call.new_tokens(value, positions)
    is_counted = op.And(is_new, is_no_sink)
    sums = [op.ReduceSum(op.Where(is_counted, tokens, 0.0), [3], keepdims=0) for tokens in (keys, values)]
    new_counts = op.Squeeze(op.ReduceSum(op.Cast(is_counted, to=ir.DataType.FLOAT), [3], keepdims=1), [4])  # B, n, 1, 1
    # the mean before the call is with the last token then, if that was none of the sinks
    count = op.Max(op.Sub(call.past, attrs.sinks), 0)  # B, 1
    has_mean = op.Reshape(op.Greater(count, 0), [0, 1, 1, 1])
    old = call.pick(by_page(op, means), _physical_page(call, call.before(call.past)))  # B, 1, H, 2 D
    count = op.Cast(op.Reshape(count, [0, 1, 1, 1]), to=ir.DataType.FLOAT)
    old = op.Where(has_mean, op.Mul(old, count), 0.0)
    total = op.Add(old, op.CumSum(op.Concat(*sums, axis=-1), 1))
    new_means = op.Div(total, op.Max(op.Add(count, op.CumSum(new_counts, 1)), 1.0))
    pages = call.pages_held(call.newest_page())
    begins = op.Max(op.Max(op.Mul(pages, attrs.page), call.past), attrs.sinks)
    ends = op.Min(op.Mul(op.Add(pages, 1), attrs.page), call.total)
    is_touched = op.Reshape(op.Less(begins, ends), [0, 1, -1, 1])
    after = op.Where(is_touched, by_page(op, call.pick(new_means, op.Sub(pages, first))), means)
    return op.Concat(summary, after, axis=-1)


def known_part(call: Call, summaries: ir.Value) -> ir.Value:
    """Return the part of the summaries by which pages are chosen."""
    return _split(call, summaries)[0] if call.attrs.compensate else summaries


def extra_token(call: Call, query: ir.Value, summaries: ir.Value, policies: ir.Value) -> Extra:
    """Return the token that replaces those that each query dropped.

    Args:
        call: the call.
        query: float [B, H, G, S, D].
        summaries: float [B, H, P, Z], after the call.
        policies: int64 [1] or [H].
    """
    op, attrs = call.op, call.attrs
    query_positions = op.Add(op.Sub(call.total, call.columns), call.range(call.columns))  # B, S
    end = op.Div(op.Max(op.Sub(query_positions, attrs.recent - 1), 0), attrs.page)
    count = op.Sub(op.Mul(end, attrs.page), attrs.sinks)
    means = call.pick(by_page(op, _split(call, summaries)[1]), _physical_page(call, op.Sub(end, 1)))  # B, S, H, 2 D
    streams = op.Reshape(heads_with(op, policies, lambda policy: policy.may_drop), [1, -1, 1, 1])
    is_there = op.And(op.Reshape(op.Greater(count, 0), [0, 1, -1, 1]), streams)  # B, 1 or H, S, 1
    keys, values = op.Split(op.Transpose(means, perm=[0, 2, 1, 3]), axis=3, num_outputs=2, _outputs=2)
    bad_keys, bad_values = (op.And(op.IsNaN(op.Mul(tensor, 0.0)), is_there) for tensor in (keys, values))
    keys = op.Where(op.And(is_there, op.Not(bad_keys)), keys, 0.0)
    values = op.Where(op.And(is_there, op.Not(bad_values)), values, 0.0)
    score = scale_scores(call, op.ReduceSum(op.Mul(query, op.Unsqueeze(keys, [2])), [-1], keepdims=1))
    logarithm = op.Log(op.Cast(op.Max(count, 1), to=ir.DataType.FLOAT))
    score = op.Add(score, op.Reshape(logarithm, [0, 1, 1, -1, 1]))
    bad_key = op.Cast(op.ReduceMax(op.Cast(bad_keys, to=ir.DataType.UINT8), [-1]), to=ir.DataType.BOOL)
    is_bad = op.Unsqueeze(op.Or(bad_key, bad_values), [2])
    return Extra(op.Where(op.Unsqueeze(is_there, [2]), score, -math.inf), values, is_bad)


def scale_scores(call: Call, products: ir.Value) -> ir.Value:
    """Return scale q . k, softcapped."""
    op, attrs = call.op, call.attrs
    scores = op.Mul(products, attrs.scale)
    return op.Mul(op.Tanh(op.Div(scores, attrs.softcap)), attrs.softcap) if attrs.softcap else scores


def _physical_page(call: Call, page: ir.Value) -> ir.Value:
    """Return where a page of the sequence, int64 of any shape, lies; a negative one lies anywhere."""
    op, first = call.op, call.attrs.first_pages
    ring = op.Max(op.Sub(call.pages, first), 1)
    wrapped_page = op.Add(op.Mod(op.Max(op.Sub(page, first), 0), ring), first)
    return op.Where(op.Less(page, first), page, wrapped_page)


def _split(call: Call, summaries: ir.Value) -> tuple[ir.Value, ir.Value]:
    op = call.op
    end_of_summary = op.Mul(call.channels, -2)
    return op.Slice(summaries, [0], end_of_summary, [-1]), op.Slice(summaries, end_of_summary, [_END], [-1])
