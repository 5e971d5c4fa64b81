"""The body of ``ai.graphopt::KVAttention``: standard ONNX operators, for one set of attributes.

Types and shapes of the state follow from the attributes, and so does which nodes there are: an ``If`` on an attribute
would still have branches whose types do not fit. So each set of attributes has a body of its own, told apart by the
overload, the part of a function's name that ONNX has for this. onnxruntime 1.31 gives each node the body of its
overload, and a kernel takes nodes of all overloads. onnxruntime 1.18 to 1.24 know no overloads, and give all nodes
the same body: so a body compares the attributes of its node with those that it was made for, and where they differ it
fails. For their sake, and to have fewer bodies, what layers differ in most is read from the node: its window, its
policies, and its slopes.

The body computes scores of all pages, then hides what is not read: it says what is meant, and costs what dense
attention costs.
"""

# onnxscript's builder makes operators by name, so its values have no static type.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.runtime_ops.kv_attention.spec.attributes import DENSE, RETRIEVAL, STREAMING, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.body_append import (
    Call,
    append_floats,
    append_integers,
    append_summaries,
    heads_with,
    value_part,
)
from graphopt.runtime_ops.kv_attention.spec.body_compensation import append_means, extra_token
from graphopt.runtime_ops.kv_attention.spec.body_read import attend, dense_weights, heads_apart, read_mask
from graphopt.runtime_ops.kv_attention.spec.check import MOST_TOKENS
from graphopt.runtime_ops.kv_attention.spec.schema import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Mapping

    from onnxscript import OpBuilder

    from graphopt.runtime_ops.kv_attention.spec.policies import Policy

# What a Constant calls a value of that kind.
_FIELDS = {
    ir.AttributeType.INT: "value_int",
    ir.AttributeType.FLOAT: "value_float",
    ir.AttributeType.STRING: "value_string",
    ir.AttributeType.INTS: "value_ints",
}

_TYPES = {**SCHEMA.attributes, **SCHEMA.optional}

# Layers differ in these. The body reads them from its node, so that such layers share it.
_OF_NODE = ("window", "policies", "slopes")


def function(opset: int, **attributes: Any) -> ir.Function:
    """Return the body for a node with these attributes, as a function of the given ONNX opset.

    Raises:
        ValueError: an attribute is out of its range.
    """
    # heavy, and needed only where a model is made
    from graphopt.runtime_ops.builder import build_body

    attrs = KVAttributes(**attributes)
    types = {name: kind for name, kind in _TYPES.items() if name in attrs.for_node()}
    ports = [port for port in SCHEMA.inputs if not port.is_trailing or attrs.key_feedback]
    schema = replace(SCHEMA, attributes=types, inputs=tuple(ports))
    return build_body(schema, overload(**attributes), opset, lambda op, inputs: _write(op, attrs, inputs))


def overload(**attributes: Any) -> str:
    """Return the name of the body for these attributes: those that it is made for, floats as a file holds them.

    Raises:
        ValueError: an attribute is out of its range.
    """
    attrs = KVAttributes(**attributes)
    parts = [f"retrieves={int(RETRIEVAL in attrs.policies)}"]
    parts += [f"{policy.name}=1" for policy in _later_policies(attrs)]
    parts += ["slopes=1"] if attrs.slopes else []
    for name, value in attrs.for_node().items():
        if name not in _OF_NODE:
            # np.float32 says 0.1 where Python says 0.10000000149011612
            parts.append(f"{name}={str(np.float32(value)) if isinstance(value, float) else value}")
    return ",".join(parts)


def _later_policies(attrs: KVAttributes) -> list[Policy]:
    """Return the policies of a node for which its body is made, besides retrieval.

    Dense and streaming heads may share a body.
    """
    return [policy for policy in attrs.policies_in_use if policy.number not in (DENSE, STREAMING, RETRIEVAL)]


def _write(op: OpBuilder, attrs: KVAttributes, inputs: Mapping[str, ir.Value]) -> tuple[ir.Value, ...]:
    query, key, value = (op.Cast(inputs[name], to=ir.DataType.FLOAT) for name in ("query", "key", "value"))
    past, new = (op.Reshape(inputs[name], [-1, 1]) for name in ("past", "new"))
    pages, columns = op.Shape(inputs["keys"], start=2, end=3), op.Shape(key, start=1, end=2)
    window = op.Reshape(_of_node(op, "window"), [1])
    policies = _of_node(op, "policies")
    past = op.Add(past, _refusal(op, attrs, past, new, columns, pages, window, policies))
    channels = op.Div(op.Shape(key, start=2), attrs.kv_heads)
    call = Call(op, attrs, past, op.Add(past, new), columns, pages, channels)
    if attrs.levels is None:
        K, keys = append_floats(call, inputs["keys"], key, is_keys=True)
        if attrs.value_size:
            V, values = value_part(op, attrs, K), op.Identity(inputs["values"])
        else:
            V, values = append_floats(call, inputs["values"], value, is_keys=False)
        scales, recent = op.Identity(inputs["scales"]), op.Identity(inputs["recent"])
    else:
        state = (inputs["keys"], inputs["values"], inputs["scales"], inputs["recent"])
        after = append_integers(call, state, key, value, inputs.get("feedback"))
        keys, values, scales, recent, K, V = after.keys, after.values, after.scales, after.recent, after.K, after.V
    summaries = inputs["summaries"]
    if attrs.summary_policy is not None:
        summaries = append_summaries(call, attrs.summary_policy, summaries, key)
    if attrs.compensate:
        summaries = append_means(call, summaries, key, value)
    if not attrs.summarizes:
        summaries = op.Identity(summaries)
    token_shape = op.Concat([0, 0, -1], channels, axis=0)
    shapes = (token_shape, [0, 0, -1, attrs.value_size] if attrs.value_size else token_shape)
    K, V = (
        op.Reshape(op.Transpose(tensor, perm=[0, 2, 1, 3, 4]), shape)
        for tensor, shape in zip((K, V), shapes, strict=True)
    )
    q, first = heads_apart(call, query), None
    if attrs.sinks:
        # one behind the other, the first of them is sink_query where that is given
        sink_query = op.Cast(inputs["sink_query"], to=ir.DataType.FLOAT)
        flat = op.Concat(op.Reshape(sink_query, [-1]), op.Reshape(query, [-1]), axis=0)
        shape = op.Shape(query)
        first_query = op.Reshape(op.Slice(flat, [0], op.ReduceProd(shape, keepdims=1)), shape)
        first = heads_apart(call, first_query)
    is_read = read_mask(
        call,
        q,
        summaries,
        window,
        policies,
        lambda visible: dense_weights(call, q, first, K, inputs["sink_logits"], visible),
    )
    extra = extra_token(call, q, summaries, policies) if attrs.compensate else None
    attention = attend(call, q, first, K, V, is_read, inputs["sink_logits"], extra)
    is_token = op.GreaterOrEqual(op.Add(call.range(columns), new), columns)  # B, S
    masked_y = op.Where(op.Reshape(is_token, [0, 1, 1, -1, 1]), attention, 0.0)
    rows_of_heads = op.Transpose(masked_y, perm=[0, 3, 1, 2, 4])
    y_shape = op.Shape(query)
    if attrs.value_size:
        width = op.Mul(op.Div(op.Shape(query, start=2), channels), attrs.value_size)
        y_shape = op.Concat(op.Shape(query, start=0, end=2), width, axis=0)
    y = op.Reshape(rows_of_heads, y_shape)
    return op.CastLike(y, inputs["query"]), keys, values, scales, recent, summaries


def _refusal(
    op: OpBuilder,
    attrs: KVAttributes,
    past: ir.Value,
    new: ir.Value,
    columns: ir.Value,
    pages: ir.Value,
    window: ir.Value,
    policies: ir.Value,
) -> ir.Value:
    """Return 0, int64 [1]; if numbers of tokens or attributes do not fit, a Gather fails: ONNX has no other error."""
    is_wrong = op.Or(op.Less(past, 0), op.Or(op.Less(new, 0), op.Greater(new, columns)))
    is_wrong = op.Or(is_wrong, op.Greater(past, op.Sub(MOST_TOKENS, new)))
    is_full = op.Greater(past, op.Sub(op.Mul(pages, attrs.page), new))
    ring = op.Sub(pages, attrs.first_pages)
    least_tokens = op.Add(columns, op.Add(op.Max(window, attrs.recent), (1 + attrs.compensate) * attrs.page))
    fits = op.And(op.Greater(ring, 0), op.GreaterOrEqual(op.Mul(ring, attrs.page), least_tokens))
    wraps = op.And(fits, op.Not(_has_flag(op, op.Not(heads_with(op, policies, lambda policy: policy.may_drop)))))
    is_wrong = op.Or(op.Or(is_wrong, op.And(is_full, op.Not(wraps))), _is_for_another(op, attrs, policies))
    if attrs.compensate:
        is_wrong = op.Or(is_wrong, op.Greater(window, 0))
    wrong = op.ReduceMax(op.Cast(is_wrong, to=ir.DataType.INT32), keepdims=0)
    return op.Gather([0], op.Reshape(wrong, [1]))


def _is_for_another(op: OpBuilder, attrs: KVAttributes, policies: ir.Value) -> ir.Value:
    """Return whether the node needs another body, bool [1]; constant, so folded when a model loads."""

    def misses(number: int, is_there: bool) -> ir.Value:
        return op.Not(op.Equal(_has_flag(op, op.Equal(policies, number)), op.Constant(value=ir.tensor([is_there]))))

    differs = [misses(RETRIEVAL, RETRIEVAL in attrs.policies)]
    differs += [misses(policy.number, True) for policy in _later_policies(attrs)]
    for name, value in attrs.for_node().items():
        if name not in _OF_NODE:
            is_same = op.Equal(_of_node(op, name), op.Constant(**{_FIELDS[_TYPES[name]]: value}))
            differs.append(op.Reshape(op.Not(is_same), [1]))
    return _has_flag(op, op.Concat(*differs, axis=0))


def _of_node(op: OpBuilder, name: str) -> ir.Value:
    """Return an attribute of the node: a scalar, or int64 [n]."""
    field = _FIELDS[_TYPES[name]]
    return op.Constant(**{field: ir.RefAttr(field, name, _TYPES[name])})


def _has_flag(op: OpBuilder, flags: ir.Value) -> ir.Value:
    """Return whether one of the flags [n] is set, bool [1]."""
    return op.Cast(op.ReduceMax(op.Cast(flags, to=ir.DataType.INT32), keepdims=1), to=ir.DataType.BOOL)
