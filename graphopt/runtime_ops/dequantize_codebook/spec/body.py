"""The body of ``ai.graphopt::DequantizeCodebook``, whose nodes that of ``MatMulCodebook`` shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphopt.runtime_ops.dequantize_codebook.spec.packing import LANES
from graphopt.runtime_ops.dequantize_codebook.spec.schema import SCHEMA, overload
from graphopt.runtime_ops.operator import DOMAIN
from graphopt.runtime_ops.tape import ints, number_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_INT32, _INT64, _FLOAT = ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT


def matrix_body(opset: int, **attributes: Any) -> ir.Function:
    """Return the body. It depends on constants alone, so onnxruntime folds it when it loads the model."""
    inputs = [ir.Value(name=name) for name in SCHEMA.input_names]
    tape = ir.tape.Tape()
    weight = matrix_nodes(tape, inputs, **attributes)
    weight.name = "W"
    graph = ir.Graph(inputs, [weight], nodes=tape.nodes, opset_imports={"": opset}, name=SCHEMA.name)
    return ir.Function(DOMAIN, SCHEMA.name, overload(**attributes), graph=graph, attributes=SCHEMA.parameters)


def matrix_nodes(tape: ir.tape.Tape, inputs: Sequence[ir.Value], **attributes: Any) -> ir.Value:
    """Return W of the operator's inputs, with nodes for the attributes that :func:`overload` names."""
    codes, scales, levels, level_table, books, shifts = inputs
    index, second, signs, level_bits = (
        attributes[name] for name in ("index_bits", "second_bits", "sign_bits", "level_bits")
    )
    rows, columns = (number_of(tape, name) for name in ("rows", "columns"))
    size = tape.op("Shape", [books], {"start": 1})
    digits = _digits(tape, codes)
    values = tape.op("Gather", [books, _number(tape, digits, 0, index)])
    if second:
        first = tape.op("Cast", [ints(tape, 2**index)], {"to": _INT32})
        second_index = tape.op("Add", [_number(tape, digits, index, second), first])
        values = tape.op("Add", [values, tape.op("Gather", [books, second_index])])
    if signs:
        values = _change_signs(tape, values, digits, index + second, signs, size)
    last_bit = tape.op("Slice", [digits, ints(tape, index + second + signs), ints(tape, 2**31), ints(tape, 2)])
    shift = tape.op("ReduceSum", [last_bit, ints(tape, 2)], {"keepdims": 0})  # one bit, or none
    values = tape.op("Add", [values, tape.op("Unsqueeze", [tape.op("Gather", [shifts, shift]), ints(tape, -1)])])
    matrix = _matrix(tape, values, attributes["axis"], size)
    matrix = tape.op("Slice", [matrix, ints(tape, 0, 0), tape.op("Concat", [rows, columns], {"axis": 0})])
    steps = _rows(tape, scales, rows, columns, number_of(tape, "span"))
    if level_bits:
        level = _number(tape, _digits(tape, levels), 0, level_bits)
        of_level = (tape.op("Gather", [_row(tape, level_table, row), level]) for row in (0, 1))
        factors, offsets = (_rows(tape, part, rows, columns, number_of(tape, "group")) for part in of_level)
    else:
        factors, offsets = (_row(tape, level_table, row) for row in (0, 1))
    return tape.op("Mul", [tape.op("Add", [matrix, offsets]), tape.op("Mul", [factors, steps])])


def _digits(tape: ir.tape.Tape, words: ir.Value) -> ir.Value:
    """Return the bits of codes uint8 [T, B, 2 bits] as int32 [T, B, bits, 16]."""
    head = tape.op("Shape", [words], {"end": 2})
    octets = tape.op("Reshape", [words, tape.op("Concat", [head, ints(tape, -1, 2, 1)], {"axis": 0})])
    powers = tape.op("Cast", [ints(tape, *(2**bit for bit in range(8)))], {"to": _INT32})
    quotients = tape.op("Div", [tape.op("Cast", [octets], {"to": _INT32}), powers])
    bits = tape.op("Mod", [quotients, tape.op("Cast", [ints(tape, 2)], {"to": _INT32})])
    return tape.op("Reshape", [bits, tape.op("Concat", [head, ints(tape, -1, LANES)], {"axis": 0})])


def _number(tape: ir.tape.Tape, digits: ir.Value, first: int, count: int) -> ir.Value:
    """Return what ``count`` bits from ``first`` on are as numbers, int32 [T, B, 16]."""
    part = tape.op("Slice", [digits, ints(tape, first), ints(tape, first + count), ints(tape, 2)])
    powers = tape.op("Cast", [ints(tape, *(2**bit for bit in range(count)))], {"to": _INT32})
    products = tape.op("Mul", [part, tape.op("Unsqueeze", [powers, ints(tape, 1)])])
    return tape.op("ReduceSum", [products, ints(tape, 2)], {"keepdims": 0})


def _change_signs(
    tape: ir.tape.Tape, values: ir.Value, digits: ir.Value, first: int, count: int, size: ir.Value
) -> ir.Value:
    part = tape.op("Slice", [digits, ints(tape, first), ints(tape, first + count), ints(tape, 2)])
    signs = tape.op("Transpose", [part], {"perm": [0, 1, 3, 2]})  # T, B, 16, count
    # the last sign is the parity of the others where it is not there
    total = tape.op("ReduceSum", [signs, ints(tape, 3)], {"keepdims": 1})
    parity = tape.op("Mod", [total, tape.op("Cast", [ints(tape, 2)], {"to": _INT32})])
    full = tape.op("Concat", [signs, parity], {"axis": 3})
    full = tape.op("Slice", [full, ints(tape, 0), size, ints(tape, 3)])
    two, unit = (tape.op("Constant", [], {"value_float": number}) for number in (2.0, 1.0))
    factors = tape.op("Sub", [unit, tape.op("Mul", [two, tape.op("Cast", [full], {"to": _FLOAT})])])
    return tape.op("Mul", [values, factors])


def _matrix(tape: ir.tape.Tape, values: ir.Value, axis: int, size: ir.Value) -> ir.Value:
    """Return what codes mean, [T, B, 16, d], as a matrix of whole blocks."""
    if axis == 0:
        of_block = tape.op("Transpose", [values], {"perm": [1, 3, 0, 2]})
    else:
        head = tape.op("Shape", [values], {"end": 2})
        shape = tape.op("Concat", [head, size, ints(tape, LANES)], {"axis": 0})
        of_block = tape.op("Transpose", [tape.op("Reshape", [values, shape])], {"perm": [1, 2, 0, 3]})
    tiles = tape.op("Shape", [values], {"end": 1})
    width = tape.op("Mul", [tiles, ints(tape, LANES)])
    return tape.op("Reshape", [of_block, tape.op("Concat", [ints(tape, -1), width], {"axis": 0})])


def _row(tape: ir.tape.Tape, table: ir.Value, row: int) -> ir.Value:
    return tape.op("Squeeze", [tape.op("Gather", [table, ints(tape, row)]), ints(tape, 0)])


def _rows(tape: ir.tape.Tape, tensor: ir.Value, rows: ir.Value, columns: ir.Value, run: ir.Value) -> ir.Value:
    """Return numbers [T, G, 16], each of ``run`` rows, as float [rows, columns]."""
    groups = tape.op("Shape", [tensor], {"start": 1, "end": 2})
    whole = tape.op("Transpose", [tape.op("Cast", [tensor], {"to": _FLOAT})], {"perm": [1, 0, 2]})
    whole = tape.op("Reshape", [whole, tape.op("Concat", [groups, ints(tape, -1)], {"axis": 0})])
    part = tape.op("Slice", [whole, ints(tape, 0), columns, ints(tape, 1)])
    bounds = (tape.op("Squeeze", [bound]) for bound in (ints(tape, 0), rows, ints(tape, 1)))
    of_row = tape.op("Div", [tape.op("Range", [*bounds]), run])
    return tape.op("Gather", [part, of_row], {"axis": 0})
