"""The body of ``ai.graphopt::MatMulExperts``: standard ONNX operators, the same for all bits, groups and shapes.

As in the body of MatMulTable onnxruntime folds the weights, here of all experts, when it loads the model. A ``Loop``
over the experts multiplies the rows of each and puts the products where their slots are.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from graphopt.runtime_ops.matmul_experts.spec.schema import SCHEMA
from graphopt.runtime_ops.matmul_table.spec.activations import (
    SYMMETRIC,
    WITH_ZERO_POINTS,
    bfloat16_nodes,
    range_nodes,
    rounding_nodes,
)
from graphopt.runtime_ops.matmul_table.spec.body import flags_of, sizes_of, weight_of
from graphopt.runtime_ops.matmul_table.spec.packing import TILE
from graphopt.runtime_ops.matmul_table.spec.schema import overload
from graphopt.runtime_ops.operator import DOMAIN
from graphopt.runtime_ops.tape import choice, ints

_FLOAT, _BOOL, _INT64 = ir.DataType.FLOAT, ir.DataType.BOOL, ir.DataType.INT64


def function(opset: int, **attributes: Any) -> ir.Function:
    """Return the body as a function of the given ONNX opset; its attributes are references to those of the node."""
    name, activations = overload(**attributes), attributes.get("activations", "")
    inputs = [ir.Value(name=name) for name in SCHEMA.input_names]
    x, codes, scales, table, zero_points, bias, experts = inputs
    tape = ir.tape.Tape()
    rows, columns, group = sizes_of(tape)
    flags = flags_of(attributes)
    wide = tape.op("Cast", [x], {"to": _FLOAT})
    if activations in WITH_ZERO_POINTS:
        values = table
        product_rows = range_nodes(tape, wide, activations, rows, group)
    else:
        mode = choice(tape, "activations", ir.AttributeType.STRING, SYMMETRIC)
        is_bfloat16 = tape.op("Equal", [mode, ints(tape, SYMMETRIC.index("bfloat16"))])
        # the sums of a trellis are bfloat16 as they are
        halves = table if flags["trellis"] else bfloat16_nodes(tape, table)
        values = tape.op("Where", [is_bfloat16, halves, table])
        product_rows = rounding_nodes(tape, wide, mode, rows, group)
    weights = _weights(tape, (codes, scales, values, zero_points), (rows, columns, group), flags)
    count = tape.op("Shape", [codes], {"start": 0, "end": 1})
    biases = tape.op("Expand", [bias, _concat(tape, count, columns)])
    slots = tape.op("Size", [experts])
    choices = tape.op("Reshape", [experts, ints(tape, -1)])
    matrix = tape.op("Reshape", [product_rows, _concat(tape, ints(tape, -1), rows)])
    zero, unit = (tape.op("Constant", [], {"value_int": number}) for number in (0, 1))
    # the row of x that a slot reads: slots of a row stand together
    offsets = tape.op(
        "Mul", [tape.op("Range", [zero, slots, unit]), tape.op("Shape", [matrix], {"start": 0, "end": 1})]
    )
    row_of_slot = tape.op("Div", [offsets, tape.op("Max", [slots, unit])])
    size = _concat(tape, tape.op("Reshape", [slots, ints(tape, 1)]), columns)
    zeros = tape.op("Expand", [tape.op("Constant", [], {"value_float": 0.0}), size])
    step = _step(matrix, row_of_slot, choices, weights, biases)
    products = tape.op(
        "Loop", [tape.op("Squeeze", [count]), tape.op("Cast", [unit], {"to": _BOOL}), zeros], {"body": step}
    )
    shape = _concat(tape, tape.op("Shape", [experts]), columns)
    y = tape.op("CastLike", [tape.op("Reshape", [products, shape], {"allowzero": 1}), x])
    y.name = "y"
    graph = ir.Graph(inputs, [y], nodes=tape.nodes, opset_imports={"": opset}, name=SCHEMA.name)
    return ir.Function(DOMAIN, SCHEMA.name, name, graph=graph, attributes=SCHEMA.parameters_for(name))


def _weights(
    tape: ir.tape.Tape,
    stacks: tuple[ir.Value, ir.Value, ir.Value, ir.Value],
    sizes: tuple[ir.Value, ir.Value, ir.Value],
    flags: dict[str, bool],
) -> ir.Value:
    """Return the weights of all experts, float [E, K, N]: side by side they are one weight of MatMulTable."""
    codes, scales, table, zero_points = stacks
    rows, columns, group = sizes
    whole_zeros = tape.op("Expand", [zero_points, tape.op("Shape", [scales])])
    all_codes, all_scales, all_zeros = (_side_by_side(tape, stack) for stack in (codes, scales, whole_zeros))
    count, tiles = (tape.op("Shape", [codes], {"start": axis, "end": axis + 1}) for axis in (0, 1))
    full_columns = tape.op("Mul", [tiles, ints(tape, TILE)])
    all_columns = tape.op("Mul", [count, full_columns])
    weight = weight_of(tape, (all_codes, all_scales, table, all_zeros), (rows, all_columns, group), **flags)
    by_expert = tape.op("Reshape", [weight, _concat(tape, rows, count, full_columns)])
    cut = tape.op("Slice", [by_expert, ints(tape, 0), columns, ints(tape, 2)])
    return tape.op("Transpose", [cut], {"perm": [1, 0, 2]})


def _side_by_side(tape: ir.tape.Tape, stack: ir.Value) -> ir.Value:
    """Return a stack [E, T, ...] as [E T, ...]."""
    of_tile = tape.op("Shape", [stack], {"start": 2})
    return tape.op("Reshape", [stack, _concat(tape, ints(tape, -1), of_tile)])


def _step(matrix: ir.Value, row_of_slot: ir.Value, choices: ir.Value, weights: ir.Value, biases: ir.Value) -> ir.Graph:
    """Return what is done for an expert: products of the slots that chose it take their places in y [slots, N]."""
    index, goes_on = ir.val("step_index", _INT64, []), ir.val("step_on", _BOOL, [])
    before = ir.val("step_before", _FLOAT, [None, None])
    tape = ir.tape.Tape()
    slots = tape.op("Squeeze", [tape.op("NonZero", [tape.op("Equal", [choices, index])]), ints(tape, 0)])
    rows = tape.op("Gather", [matrix, tape.op("Gather", [row_of_slot, slots])])
    product = tape.op("MatMul", [rows, tape.op("Gather", [weights, index])])
    part = tape.op("Add", [product, tape.op("Gather", [biases, index])])
    after = tape.op("ScatterND", [before, tape.op("Unsqueeze", [slots, ints(tape, 1)]), part])
    flag = tape.op("Identity", [goes_on])
    for number, node in enumerate(tape.nodes):
        node.outputs[0].name = f"step_{number}"
    return ir.Graph([index, goes_on, before], [flag, after], nodes=tape.nodes, name="step")


def _concat(tape: ir.tape.Tape, *shapes: ir.Value) -> ir.Value:
    return tape.op("Concat", shapes, {"axis": 0})
