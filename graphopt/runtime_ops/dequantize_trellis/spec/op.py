"""``ai.graphopt::DequantizeTrellis``, version 1: the matrix that codes of a trellis stand for.

Inputs, all of them required:
    codes: uint8 [K, N], one code per byte, each below 2^bits.
    scales: float or float16 [G, N], G = ceil(K / group); finite.
    tables: float [2, entries], finite; entries is a power of two, and entries^2 is at most 2^(4 bits).

Attributes:
    bits: int, 1 to 6.
    group: int, the rows that share a scale. The last group may be shorter.

Output:
    W: float [K, N], in float32 arithmetic, with g = k div group::

        W[k, n] = (tables[0, upper] + tables[1, lower]) scales[g, n]

    The window of a weight is the first 2 log2(entries) bits of its code and of those of its three right neighbours, the
    weight's own code first and each from its highest bit. ``upper`` is the first half of the window, ``lower`` the
    second. Neighbours are circular within 16 columns: right of column 16 t + 15, or of the last column, is column 16 t.

This is how such a weight is written between the phases ``codes`` and ``lower``. It has no kernel: the step ``lower``
packs the codes for ``MatMulTable``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.numerics.formats.steps import integer_step
from graphopt.runtime_ops.dequantize_trellis.spec.schema import SCHEMA
from graphopt.runtime_ops.matmul_table.spec.packing import TILE
from graphopt.runtime_ops.operator import DOMAIN, Operator
from graphopt.runtime_ops.tape import ints, number_of

if TYPE_CHECKING:
    from collections.abc import Sequence

Floats = npt.NDArray[np.floating[Any]]

CODES = 4
"""Codes that a window may reach into."""

_TABLES = 2


def function(opset: int) -> ir.Function:
    """Return the body. It depends on constants alone, so onnxruntime folds it when it loads the model."""
    inputs = [ir.Value(name=name) for name in SCHEMA.input_names]
    codes, scales, tables = inputs
    tape = ir.tape.Tape()
    rows, columns = (tape.op("Shape", [codes], {"start": axis, "end": axis + 1}) for axis in (0, 1))
    of_row = tape.op("Div", [_range(tape, rows), number_of(tape, "group")])
    factors = tape.op("Gather", [tape.op("Cast", [scales], {"to": ir.DataType.FLOAT}), of_row], {"axis": 0})
    values = value_nodes(tape, codes, columns, tables, number_of(tape, "bits"))
    weight = tape.op("Mul", [values, factors])
    weight.name = "W"
    graph = ir.Graph(inputs, [weight], nodes=tape.nodes, opset_imports={"": opset}, name=SCHEMA.name)
    return ir.Function(DOMAIN, SCHEMA.name, graph=graph, attributes=SCHEMA.parameters)


def value_nodes(tape: ir.tape.Tape, codes: ir.Value, columns: ir.Value, tables: ir.Value, bits: ir.Value) -> ir.Value:
    """Return what codes uint8 [K, N] mean, float [K, N]; ``columns`` (N) and ``bits`` are int64 [1]."""
    code = _int32(tape, codes)
    right = (
        tape.op("Gather", [code, _neighbours(tape, columns, distance)], {"axis": 1}) for distance in range(1, CODES)
    )
    return window_value_nodes(tape, [code, *right], tables, bits)


def window_value_nodes(tape: ir.tape.Tape, codes: Sequence[ir.Value], tables: ir.Value, bits: ir.Value) -> ir.Value:
    """Return what codes mean, float: ``codes`` are int32, of a weight and of its right neighbours in order."""
    base, entries = _int32(tape, tape.op("Pow", [ints(tape, 2), bits])), tape.op("Shape", [tables], {"start": 1})
    stream, *right = codes
    for neighbours in right:
        stream = tape.op("Add", [tape.op("Mul", [stream, base]), neighbours])
    streams = tape.op("Pow", [ints(tape, 2), tape.op("Mul", [bits, ints(tape, CODES)])])
    streams_of_window = tape.op("Div", [streams, tape.op("Mul", [entries, entries])])
    windows = tape.op("Div", [stream, _int32(tape, streams_of_window)])
    upper, lower = (tape.op(kind, [windows, _int32(tape, entries)]) for kind in ("Div", "Mod"))
    head, tail = (
        tape.op("Squeeze", [tape.op("Gather", [tables, ints(tape, index)]), ints(tape, 0)]) for index in (0, 1)
    )
    return tape.op("Add", [tape.op("Gather", [head, upper]), tape.op("Gather", [tail, lower])])


def _int32(tape: ir.tape.Tape, value: ir.Value) -> ir.Value:
    return tape.op("Cast", [value], {"to": ir.DataType.INT32})


def _range(tape: ir.tape.Tape, end: ir.Value) -> ir.Value:
    return tape.op("Range", [tape.op("Squeeze", [bound]) for bound in (ints(tape, 0), end, ints(tape, 1))])


def _neighbours(tape: ir.tape.Tape, columns: ir.Value, distance: int) -> ir.Value:
    """Return which column lies ``distance`` to the right of each, int64 [N]."""
    column = _range(tape, columns)
    first = tape.op("Mul", [tape.op("Div", [column, ints(tape, TILE)]), ints(tape, TILE)])
    width = tape.op("Min", [tape.op("Sub", [columns, first]), ints(tape, TILE)])
    step = tape.op("Add", [tape.op("Sub", [column, first]), ints(tape, distance)])
    return tape.op("Add", [first, tape.op("Mod", [step, width])])


def reference(
    codes: npt.NDArray[np.uint8], scales: Floats, tables: Floats, bits: int, group: int
) -> npt.NDArray[np.float32]:
    """Return what the operator means, float32 [K, N].

    Raises:
        ValueError: the shapes do not fit one another.
    """
    rows, columns = codes.shape
    weight = values_of(codes, tables, bits)
    if scales.shape != (-(-rows // group), columns):
        raise ValueError(f"scales must be [{-(-rows // group)}, {columns}], not {list(scales.shape)}")
    return np.asarray(weight * scales.astype(np.float32)[np.arange(rows) // group])


def values_of(codes: npt.NDArray[np.uint8], tables: Floats, bits: int) -> npt.NDArray[np.float32]:
    """Return the value of each code [K, N], before it is scaled.

    Raises:
        ValueError: the tables do not fit codes of so many bits.
    """
    entries = tables.shape[-1]
    field = entries.bit_length() - 1
    if tables.ndim != _TABLES or entries != 2**field or 2 * field > CODES * bits:
        raise ValueError(f"tables of {entries} values do not fit codes of {bits} bits")
    values = np.empty(codes.shape, np.float32)
    for begin in range(0, codes.shape[1], TILE):
        tile = codes[:, begin : begin + TILE].astype(np.int64)
        width = tile.shape[1]
        for column in range(width):
            stream = sum(tile[:, (column + j) % width] << (CODES - 1 - j) * bits for j in range(CODES))
            window = stream >> (CODES * bits - 2 * field)
            values[:, begin + column] = tables[0, window >> field] + tables[1, window & (entries - 1)]
    return values


def are_bytes(tables: Floats, bits: int) -> bool:
    """Return whether ``MatMulTable`` takes such tables: its definition says which sums are bytes."""
    if bits not in range(2, 7) or tables.shape != (2, max(16, 2**bits)):
        return False
    divisor = integer_step(tables.ravel().tolist(), np.inf)
    assert divisor is not None
    numerator, denominator = divisor.as_integer_ratio()
    step = (numerator & -numerator) / denominator
    heads, tails = tables.astype(np.float64) / step
    largest = max(heads.max() + tails.max(), -heads.min() - tails.min())
    return bool(2**-16 <= step <= 2**16 and np.abs(tables).max() <= 32767 * step and largest <= 127)


DEQUANTIZE_TRELLIS = Operator(SCHEMA, function, reference)
