"""The bodies of ``ai.graphopt::LinearRecurrence``, one for each rule: standard ONNX operators, the same for all shapes.

A ``Loop`` over the tokens, as many as there are, holds the state [B, H, K, V]. A ``Scan`` of onnxruntime would need at
least one.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from graphopt.runtime_ops.linear_recurrence.spec.schema import SCHEMA
from graphopt.runtime_ops.operator import DOMAIN
from graphopt.runtime_ops.tape import full_mask, ints

_FLOAT, _BOOL = ir.DataType.FLOAT, ir.DataType.BOOL


def overload(**attributes: Any) -> str:
    """Return the name of the body for these attributes: "delta" for the delta rule, "" for sums.

    Raises:
        ValueError: there is no such rule.
    """
    delta = attributes["delta"]
    if delta not in (0, 1):
        raise ValueError(f"LinearRecurrence: delta must be 0 or 1, and is {delta!r}")
    return "delta" if delta else ""


def function(opset: int, **attributes: Any) -> ir.Function:
    """Return the body for a node with these attributes, as a function of the given ONNX opset.

    Raises:
        ValueError: as :func:`overload`.
    """
    rule = overload(**attributes)
    inputs = [ir.Value(name=name) for name in SCHEMA.input_names]
    query, key, value, decay, beta, mask, state = inputs
    tape = ir.tape.Tape()
    heads = tape.op("Shape", [value], {"start": 2, "end": 3})
    q, k = (_of_each_head(tape, tensor, heads) for tensor in (query, key))
    v = _token_first(tape, tape.op("Unsqueeze", [value, ints(tape, 3)]))  # T, B, H, 1, V
    g = _token_first(tape, tape.op("Unsqueeze", [_or_default(tape, decay, 0.0), ints(tape, 4)]))  # T, B, H, D, 1
    b = _token_first(tape, tape.op("Unsqueeze", [_or_default(tape, beta, 1.0), ints(tape, 4)]))  # T, B, H, 1, 1
    is_read = tape.op("Transpose", [full_mask(tape, mask, value)], {"perm": [1, 0]})
    is_read = tape.op("Unsqueeze", [is_read, ints(tape, 2, 3, 4)])
    step = _step(rule == "delta", q, k, v, tape.op("Exp", [g]), b, is_read)
    count = tape.op("Squeeze", [tape.op("Shape", [value], {"start": 1, "end": 2})])
    goes_on = tape.op("Cast", [tape.op("Constant", [], {"value_int": 1})], {"to": _BOOL})
    new_state, rows = tape.op_multi_out("Loop", [count, goes_on, state], {"body": step}, num_outputs=2)
    # T, B, H, V; without tokens a loop does not know their shape
    rows = tape.op("Reshape", [rows, tape.op("Shape", [tape.op("Squeeze", [v, ints(tape, 3)])])], {"allowzero": 1})
    scale = tape.op("Constant", [], {"value_float": ir.RefAttr("value_float", "scale", ir.AttributeType.FLOAT)})
    product = tape.op("Mul", [rows, scale])
    output = tape.op("CastLike", [tape.op("Transpose", [product], {"perm": [1, 0, 2, 3]}), value])
    output.name, new_state.name = SCHEMA.output_names
    graph = ir.Graph(inputs, [output, new_state], nodes=tape.nodes, opset_imports={"": opset}, name=SCHEMA.name)
    return ir.Function(DOMAIN, SCHEMA.name, rule, graph=graph, attributes=SCHEMA.parameters)


def _step(delta: bool, *of_tokens: ir.Value) -> ir.Graph:
    """Return what is done for a token: the state S [B, H, K, V] to the next one and S^T q [B, H, 1, V].

    Args:
        delta: the rule.
        of_tokens: q, k, v, factor, b and is_read of all tokens, along the first axis.
    """
    index, goes_on = (
        ir.val(f"step_{name}", dtype, []) for name, dtype in (("index", ir.DataType.INT64), ("on", _BOOL))
    )
    S = ir.val("step_S", _FLOAT, [None] * 4)
    tape = ir.tape.Tape()
    q, k, v, factor, b, is_read = (tape.op("Gather", [tensor, index], {"axis": 0}) for tensor in of_tokens)
    decayed_S = tape.op("Mul", [S, factor])
    difference = tape.op("Sub", [v, _product(tape, k, decayed_S)]) if delta else v
    after = tape.op("Add", [decayed_S, tape.op("MatMul", [k, tape.op("Mul", [difference, b])])])
    y = _product(tape, q, after)
    zero = tape.op("Constant", [], {"value_float": 0.0})
    outputs = [tape.op("Identity", [goes_on])]
    outputs += [tape.op("Where", [is_read, after, S]), tape.op("Where", [is_read, y, zero])]
    for number, node in enumerate(tape.nodes):
        node.outputs[0].name = f"step_{number}"
    return ir.Graph([index, goes_on, S], outputs, nodes=tape.nodes, name="step")


def _product(tape: ir.tape.Tape, row: ir.Value, S: ir.Value) -> ir.Value:
    """Return S^T row [B, H, 1, V], where the row is a column [B, H, K, 1]."""
    return tape.op("MatMul", [tape.op("Transpose", [row], {"perm": [0, 1, 3, 2]}), S])


def _token_first(tape: ir.tape.Tape, tensor: ir.Value) -> ir.Value:
    """Return a tensor [B, T, H, m, n] as float [T, B, H, m, n]."""
    return tape.op("Cast", [tape.op("Transpose", [tensor], {"perm": [1, 0, 2, 3, 4]})], {"to": _FLOAT})


def _of_each_head(tape: ir.tape.Tape, tensor: ir.Value, heads: ir.Value) -> ir.Value:
    """Return queries or keys [B, T, Hk, K] as columns of each head, float [T, B, H, K, 1]."""
    key_heads = tape.op("Shape", [tensor], {"start": 2, "end": 3})
    per_key = tape.op("Div", [heads, tape.op("Max", [key_heads, ints(tape, 1)])])
    lead, size = tape.op("Shape", [tensor], {"end": 3}), tape.op("Shape", [tensor], {"start": 3})
    of_heads = tape.op("Unsqueeze", [tensor, ints(tape, 3)])
    of_heads = tape.op("Expand", [of_heads, _concat(tape, lead, per_key, size)])
    batch = tape.op("Shape", [tensor], {"end": 2})
    columns = tape.op("Reshape", [of_heads, _concat(tape, batch, heads, size, ints(tape, 1))], {"allowzero": 1})
    return _token_first(tape, columns)


def _or_default(tape: ir.tape.Tape, tensor: ir.Value, number: float) -> ir.Value:
    """Return a tensor [B, T, H, D] as it is, or full of a number [B, T, H, 1] where D is 0."""
    lead, size = tape.op("Shape", [tensor], {"end": 3}), tape.op("Shape", [tensor], {"start": 3})
    missing = tape.op("Sub", [ints(tape, 1), tape.op("Min", [size, ints(tape, 1)])])
    numbers = tape.op("CastLike", [tape.op("Constant", [], {"value_float": number}), tensor])
    return tape.op("Concat", [tensor, tape.op("Expand", [numbers, _concat(tape, lead, missing)])], {"axis": 3})


def _concat(tape: ir.tape.Tape, *shapes: ir.Value) -> ir.Value:
    return tape.op("Concat", shapes, {"axis": 0})
