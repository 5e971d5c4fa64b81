"""The body of ``ai.graphopt::MatMulTable``: standard ONNX operators, the same for all bits, groups and shapes.

The weight depends on constants alone, and so does which way activations are rounded: onnxruntime folds both when it
loads the model, and what is left is the rounding, a ``MatMul`` with float weights and an ``Add``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.runtime_ops.dequantize_trellis.spec.op import value_nodes
from graphopt.runtime_ops.matmul_table.spec.activations import (
    SYMMETRIC,
    WITH_ZERO_POINTS,
    bfloat16_nodes,
    range_nodes,
    rounding_nodes,
)
from graphopt.runtime_ops.matmul_table.spec.levels import number_nodes
from graphopt.runtime_ops.matmul_table.spec.packing import DIGIT_BYTES, TILE, WIDTHS, line_bytes
from graphopt.runtime_ops.matmul_table.spec.schema import SCHEMA, overload
from graphopt.runtime_ops.operator import DOMAIN
from graphopt.runtime_ops.tape import choice, ints, number_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def function(opset: int, **attributes: Any) -> ir.Function:
    """Return the body as a function of the given ONNX opset; its attributes are references to those of the node."""
    name, activations = overload(**attributes), attributes.get("activations", "")
    inputs = [ir.Value(name=name) for name in SCHEMA.input_names]
    x, codes, scales, table, zero_points, bias = inputs
    tape = ir.tape.Tape()
    rows, _, group = sizes = sizes_of(tape)
    flags = flags_of(attributes)
    if activations in WITH_ZERO_POINTS:
        weight = weight_of(tape, (codes, scales, table, zero_points), sizes, **flags)
        x_of_product = range_nodes(tape, tape.op("Cast", [x], {"to": ir.DataType.FLOAT}), activations, rows, group)
    else:
        mode = choice(tape, "activations", ir.AttributeType.STRING, SYMMETRIC)
        is_bfloat16 = tape.op("Equal", [mode, ints(tape, SYMMETRIC.index("bfloat16"))])
        # the sums of a trellis are bfloat16 as they are
        halves = table if flags["trellis"] else bfloat16_nodes(tape, table)
        values = tape.op("Where", [is_bfloat16, halves, table])
        weight = weight_of(tape, (codes, scales, values, zero_points), sizes, **flags)
        x_of_product = rounding_nodes(tape, tape.op("Cast", [x], {"to": ir.DataType.FLOAT}), mode, rows, group)
    y = tape.op("CastLike", [tape.op("Add", [tape.op("MatMul", [x_of_product, weight]), bias]), x])
    y.name = "y"
    graph = ir.Graph(inputs, [y], nodes=tape.nodes, opset_imports={"": opset}, name=SCHEMA.name)
    return ir.Function(DOMAIN, SCHEMA.name, name, graph=graph, attributes=SCHEMA.parameters_for(name))


def sizes_of(tape: ir.tape.Tape) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the attributes rows, columns and group of the node, int64 [1] each."""
    return number_of(tape, "rows"), number_of(tape, "columns"), number_of(tape, "group")


def flags_of(attributes: Mapping[str, Any]) -> dict[str, bool]:
    """Return what a body says of the matrix, from the attributes of its node."""
    return {name: bool(attributes.get(name, 0)) for name in ("minimums", "trellis", "span", "base")}


def weight_of(
    tape: ir.tape.Tape,
    matrix: tuple[ir.Value, ir.Value, ir.Value, ir.Value],
    sizes: tuple[ir.Value, ir.Value, ir.Value],
    *,
    minimums: bool = False,
    trellis: bool = False,
    span: bool = False,
    base: bool = False,
) -> ir.Value:
    """Return the weight float [rows, columns] that a product multiplies by, of codes, scales, table and zero points."""
    codes, scales, table, zero_points = matrix
    rows, columns, group = sizes
    matrix_codes = unpack_nodes(tape, codes, rows, columns, base=base)
    if trellis:
        looked_up = value_nodes(tape, matrix_codes, columns, table, bits_of_codes(tape, codes))
    else:
        indices = tape.op("Cast", [matrix_codes], {"to": ir.DataType.INT32})
        looked_up = tape.op("Gather", [table, indices], {"axis": 0})
    full_zeros = tape.op("Expand", [zero_points, tape.op("Shape", [scales])])
    if span:
        scales, full_zeros = (number_nodes(tape, part, rows, group, positions_of) for part in (scales, full_zeros))
    zeros_of_row = for_each_row(tape, full_zeros, *sizes)
    differences = looked_up if minimums else tape.op("Sub", [looked_up, zeros_of_row])
    weight = tape.op("Mul", [differences, for_each_row(tape, scales, *sizes)])
    return tape.op("Add", [weight, zeros_of_row]) if minimums else weight


def unpack_nodes(
    tape: ir.tape.Tape, codes: ir.Value, rows: ir.Value, columns: ir.Value, *, base: bool = False
) -> ir.Value:
    """Return the codes as uint8 [K, N]; ``base``: they are digits."""
    positions = digits_of(tape, codes) if base else positions_of(tape, codes)
    in_order = tape.op(
        "Transpose",
        [tape.op("Reshape", [positions, ints(tape, 0, 0, 4, 16, 4)])],  # t, u, j, r, i
        {"perm": [1, 2, 4, 0, 3]},
    )
    padded_columns = tape.op("Mul", [tape.op("Shape", [codes], {"start": 0, "end": 1}), ints(tape, TILE)])
    whole = tape.op("Reshape", [in_order, tape.op("Concat", [ints(tape, -1), padded_columns], {"axis": 0})])
    ends = tape.op("Concat", [rows, columns], {"axis": 0})
    return tape.op("Slice", [whole, ints(tape, 0, 0), ends])


def positions_of(tape: ir.tape.Tape, codes: ir.Value, *, maybe_none: bool = False) -> ir.Value:
    """Return packed codes, uint8 [T, U, 32 bits], as a byte for each of a unit's positions: uint8 [T, U, 256].

    Args:
        tape: where the nodes are written.
        codes: the packed codes.
        maybe_none: whether T may be 0.
    """
    bits = bits_of_codes(tape, codes)
    positions = _plane(tape, codes, bits, WIDTHS[0], maybe_none)
    for width in WIDTHS[1:]:
        positions = tape.op("BitwiseOr", [positions, _plane(tape, codes, bits, width, maybe_none)])
    return positions


def digits_of(tape: ir.tape.Tape, codes: ir.Value) -> ir.Value:
    """Return codes that are digits of base 3, uint8 [T, U, 52], as :func:`positions_of` does; T may be 0."""
    digit_bytes = tape.op("Cast", [tape.op("Unsqueeze", [codes, ints(tape, 2)])], {"to": ir.DataType.INT32})
    powers = np.array([3**number for number in range(5)], np.int32)[:, None]
    divisors, three = (tape.op("Constant", [], {"value": ir.tensor(part)}) for part in (powers, powers[1]))
    digits = tape.op("Mod", [tape.op("Div", [digit_bytes, divisors]), three])
    narrow = tape.op("Cast", [digits], {"to": ir.DataType.UINT8})
    positions = tape.op("Reshape", [narrow, ints(tape, 0, 0, 5 * DIGIT_BYTES)])
    return tape.op("Slice", [positions, ints(tape, 0), ints(tape, 256), ints(tape, 2)])


def bits_of_codes(tape: ir.tape.Tape, codes: ir.Value) -> ir.Value:
    """Return how many bits each of the packed codes has, int64 [1]."""
    return tape.op("Div", [tape.op("Shape", [codes], {"start": 2}), ints(tape, 32)])


def _plane(tape: ir.tape.Tape, codes: ir.Value, bits: ir.Value, width: int, maybe_none: bool) -> ir.Value:
    """Return what the plane of ``width`` bits adds to each code, uint8 [T, U, 256]; zeros where there is no such plane.

    A plane that is absent is a slice of no bytes, padded to a plane of zeros.
    """
    two_widths, one_width = ints(tape, 2 * width), ints(tape, width)
    start = tape.op("Mul", [tape.op("Div", [bits, two_widths]), two_widths])
    end = tape.op("Mul", [tape.op("Div", [bits, one_width]), one_width])
    first, last = (tape.op("Mul", [bit, ints(tape, 32)]) for bit in (start, end))
    part = tape.op("Slice", [codes, first, last, ints(tape, 2)])
    missing = tape.op("Sub", [ints(tape, 32 * width), tape.op("Sub", [last, first])])
    pads = tape.op("Concat", [ints(tape, 0), missing], {"axis": 0})
    plane = tape.op("Pad", [part, pads, _bytes(tape, 0), ints(tape, 2)])
    # no axis of an empty tensor can be left to Reshape; bodies in files have the -1
    count = 32 * width // line_bytes(width) if maybe_none else -1
    lines = tape.op("Reshape", [plane, ints(tape, 0, 0, count, 1, line_bytes(width))])
    shifts = tape.op("Reshape", [_bytes(tape, *range(0, 8, width)), ints(tape, -1, 1)])
    fields = tape.op("BitShift", [lines, shifts], {"direction": "RIGHT"})
    digits = tape.op("BitwiseAnd", [fields, _bytes(tape, 2**width - 1)])
    positions = tape.op("Reshape", [digits, ints(tape, 0, 0, 256)])
    # an absent plane of a byte would begin at bit 8, and no shift may be that far
    offset = tape.op("Cast", [tape.op("Mod", [start, ints(tape, 8)])], {"to": ir.DataType.UINT8})
    return tape.op("BitShift", [positions, offset], {"direction": "LEFT"})


def for_each_row(tape: ir.tape.Tape, tensor: ir.Value, rows: ir.Value, columns: ir.Value, group: ir.Value) -> ir.Value:
    """Return scales or zero points [T, G, 16] as float [K, N]."""
    shape = tape.op("Concat", [tape.op("Shape", [tensor], {"start": 1, "end": 2}), ints(tape, -1)], {"axis": 0})
    whole = tape.op("Reshape", [tape.op("Transpose", [tensor], {"perm": [1, 0, 2]}), shape])
    per_group = tape.op("Slice", [whole, ints(tape, 0), columns, ints(tape, 1)])
    every_row = tape.op("Range", [tape.op("Squeeze", [value]) for value in (ints(tape, 0), rows, ints(tape, 1))])
    numbers = tape.op("Cast", [per_group], {"to": ir.DataType.FLOAT})
    return tape.op("Gather", [numbers, tape.op("Div", [every_row, group])], {"axis": 0})


def _bytes(tape: ir.tape.Tape, *numbers: int) -> ir.Value:
    return tape.op("Constant", [], {"value": ir.tensor(np.array(numbers, np.uint8))})
