"""The body of ``ai.graphopt::CausalConv``: standard ONNX operators, the same for all shapes.

Tokens that are read go one behind the other, behind the state (``ScatterElements``; the last row takes the padding).
Then each token gathers its L taps.
"""

from __future__ import annotations

import onnx_ir as ir

from graphopt.runtime_ops.causal_conv.spec.schema import SCHEMA
from graphopt.runtime_ops.operator import DOMAIN
from graphopt.runtime_ops.tape import choice, full_mask, ints

_FLOAT, _INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def function(opset: int) -> ir.Function:
    """Return the body as a function of the given ONNX opset."""
    inputs = [ir.Value(name=name) for name in SCHEMA.input_names]
    x, weight, bias, mask, state = inputs
    tape = ir.tape.Tape()
    is_silu = tape.op("Equal", [choice(tape, "activation", ir.AttributeType.STRING, ("none", "silu")), ints(tape, 1)])
    wide, kernel, offsets, past = (tape.op("Cast", [tensor], {"to": _FLOAT}) for tensor in (x, weight, bias, state))
    batch, channels = (tape.op("Shape", [x], {"start": axis, "end": axis + 1}) for axis in (0, 2))
    before = tape.op("Shape", [state], {"start": 2})
    is_read = full_mask(tape, mask, x)  # B, T
    count = tape.op("CumSum", [tape.op("Cast", [is_read], {"to": _INT64}), tape.op("Constant", [], {"value_int": 1})])
    rows = tape.op("Add", [before, tape.op("Shape", [x], {"start": 1, "end": 2})])
    position = tape.op("Sub", [tape.op("Add", [count, before]), ints(tape, 1)])
    target = tape.op("Where", [is_read, position, rows])
    zeros = tape.op("Expand", [_number(tape, 0.0), tape.op("Concat", [batch, ints(tape, 1), channels], {"axis": 0})])
    ahead = tape.op("Expand", [_number(tape, 0.0), tape.op("Shape", [x])])
    z = tape.op("Concat", [tape.op("Transpose", [past], {"perm": [0, 2, 1]}), ahead, zeros], {"axis": 1})
    row_indices = tape.op("Expand", [tape.op("Unsqueeze", [target, ints(tape, 2)]), tape.op("Shape", [x])])
    z = tape.op("ScatterElements", [z, row_indices, wide], {"axis": 1})
    taps = _count(tape, tape.op("Squeeze", [tape.op("Shape", [weight], {"start": 1})]))
    first = tape.op("Max", [tape.op("Sub", [count, ints(tape, 1)]), ints(tape, 0)])
    entries = tape.op("Add", [tape.op("Unsqueeze", [first, ints(tape, 2)]), taps])  # B, T, L
    entries = tape.op("Unsqueeze", [entries, ints(tape, 3)])
    windows = tape.op("GatherND", [z, entries], {"batch_dims": 1})  # B, T, L, C
    products = tape.op("Mul", [windows, tape.op("Transpose", [kernel], {"perm": [1, 0]})])
    sums = tape.op("ReduceSum", [products, ints(tape, 2)], {"keepdims": 0})
    missing = tape.op("Sub", [channels, tape.op("Shape", [bias])])
    sums = tape.op(
        "Add", [sums, tape.op("Concat", [offsets, tape.op("Expand", [_number(tape, 0.0), missing])], {"axis": 0})]
    )
    sums = tape.op("Where", [is_silu, tape.op("Mul", [sums, tape.op("Sigmoid", [sums])]), sums])
    y = tape.op("Where", [tape.op("Unsqueeze", [is_read, ints(tape, 2)]), sums, _number(tape, 0.0)])
    # as many as the state has, behind the tokens that are read
    total = tape.op("ReduceSum", [tape.op("Cast", [is_read], {"to": _INT64}), ints(tape, 1)], {"keepdims": 1})
    newest = tape.op("Add", [total, _count(tape, tape.op("Squeeze", [before]))])  # B, L - 1
    tail = tape.op("GatherND", [z, tape.op("Unsqueeze", [newest, ints(tape, 2)])], {"batch_dims": 1})
    y = tape.op("CastLike", [y, x])
    new_state = tape.op("CastLike", [tape.op("Transpose", [tail], {"perm": [0, 2, 1]}), state])
    y.name, new_state.name = SCHEMA.output_names
    graph = ir.Graph(inputs, [y, new_state], nodes=tape.nodes, opset_imports={"": opset}, name=SCHEMA.name)
    return ir.Function(DOMAIN, SCHEMA.name, graph=graph, attributes=SCHEMA.parameters)


def _number(tape: ir.tape.Tape, number: float) -> ir.Value:
    return tape.op("Constant", [], {"value_float": number})


def _count(tape: ir.tape.Tape, end: ir.Value) -> ir.Value:
    """Return 0, 1, 2, ... below ``end``."""
    zero, step = (tape.op("Constant", [], {"value_int": number}) for number in (0, 1))
    return tape.op("Range", [zero, end, step])
