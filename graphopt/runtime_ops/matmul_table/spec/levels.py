"""Scales and zero points in two levels: integers of few bits under a float16 number for each run of groups of a column.

Numbers [T, G, 16] become bytes [T, B]. A tile has its integers less ``low``, as codes of 4, 6 or 8 bits, packed as
:func:`~graphopt.runtime_ops.matmul_table.spec.packing.pack` does those of a matrix with a row for each group; behind
them its steps, float16 with the lower byte first, 16 for each run of ``span`` groups::

    number[t, g, r] = (code[t, g, r] + low) step[t, g div span, r]        in float32
    B = 32 bits ceil(G / 16) + 32 ceil(G / span)

llama.cpp's K-quants store scales and minimums so. This layout is part of the operators' meaning: files hold it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.runtime_ops.matmul_table.spec.packing import TILE, UNIT, pack, unpack
from graphopt.runtime_ops.tape import ints, number_of

if TYPE_CHECKING:
    from collections.abc import Callable

SPANS = (16, 8)
"""Groups under one step: 16 in Q2_K, Q3_K and Q6_K, 8 in Q4_K, Q5_K and IQ4_XS."""

WIDTHS = (4, 6, 8)
"""Bits that an integer may have."""

Bytes = npt.NDArray[np.uint8]


def bytes_of_tile(groups: int, bits: int, span: int) -> int:
    """Return the bytes of a tile, B."""
    return 32 * bits * -(-groups // UNIT) + 32 * -(-groups // span)


def pack_levels(levels: npt.NDArray[np.integer[Any]], steps: npt.NDArray[np.float16], bits: int, low: int) -> Bytes:
    """Return numbers in two levels as the operators read them.

    Args:
        levels: integers [..., T, G, 16] from ``low`` to ``low + 2**bits - 1``.
        steps: [..., T, R, 16].
        bits: of an integer.
        low: the integer of code 0.

    Returns:
        uint8 [..., T, B].
    """
    *lead, groups, lanes = levels.shape
    rows = (levels.astype(np.int16) - low).astype(np.uint8).reshape(-1, groups, lanes).transpose(1, 0, 2)
    codes = pack(np.ascontiguousarray(rows.reshape(groups, -1)), bits)
    halves = np.ascontiguousarray(steps, "<f2").view(np.uint8)
    return np.concatenate([codes.reshape(*lead, -1), halves.reshape(*lead, -1)], axis=-1)


def unpack_levels(data: Bytes, groups: int, span: int, low: int) -> npt.NDArray[np.float32]:
    """Return the numbers, float32 [..., T, groups, 16], of bytes [..., T, B].

    Raises:
        ValueError: so many groups do not have so many bytes.
    """
    *lead, width = data.shape
    steps_width = 32 * -(-groups // span)
    bits = next((bits for bits in WIDTHS if bytes_of_tile(groups, bits, span) == width), None)
    if data.dtype != np.uint8 or bits is None:
        widths = [bytes_of_tile(groups, bits, span) for bits in WIDTHS]
        raise ValueError(f"{groups} groups in two levels are uint8 [..., {widths}], not {data.dtype} [..., {width}]")
    tiles = data.reshape(-1, width)
    planes = np.ascontiguousarray(tiles[:, :-steps_width]).reshape(len(tiles), -1, 32 * bits)
    rows = unpack(planes, groups, TILE * len(tiles)).reshape(groups, -1, TILE).transpose(1, 0, 2)
    steps = np.ascontiguousarray(tiles[:, -steps_width:]).view("<f2").reshape(len(tiles), -1, TILE)
    of_group = np.arange(groups) // span
    levels = rows.astype(np.float32) + np.float32(low)
    numbers: npt.NDArray[np.float32] = levels * steps.astype(np.float32)[:, of_group]
    return numbers.reshape(*lead, groups, TILE)


def numbers_of(numbers: npt.NDArray[Any], rows: int, group: int, span: int, low: int) -> npt.NDArray[Any]:
    """Return scales or zero points as numbers, whatever they are stored as; a placeholder is a zero.

    Args:
        numbers: an input of an operator.
        rows: of the matrix.
        group: rows of a group.
        span: the attribute, 0 for numbers that are stored as they are.
        low: the attribute.
    """
    if not span:
        return numbers
    return unpack_levels(numbers, -(-rows // group), span, low) if numbers.size > 1 else np.zeros((1, 1, 1), np.float32)


def number_nodes(
    tape: ir.tape.Tape,
    data: ir.Value,
    rows: ir.Value,
    group: ir.Value,
    positions_of: Callable[[ir.tape.Tape, ir.Value], ir.Value],
) -> ir.Value:
    """Return the numbers, float [T, G, 16], of bytes [T, B], as nodes; zeros of zeros.

    Args:
        tape: takes the nodes.
        data: uint8 [T, B].
        rows: the attribute, int64 [1].
        group: the attribute, int64 [1].
        positions_of: makes uint8 [T, U, 256] of packed codes, see :mod:`.packing`.
    """
    unity, span = ints(tape, 1), number_of(tape, "span")

    def divide_up(number: ir.Value, divisor: ir.Value) -> ir.Value:
        return tape.op("Div", [tape.op("Add", [number, tape.op("Sub", [divisor, unity])]), divisor])

    groups = divide_up(rows, group)
    units, steps_width = divide_up(groups, ints(tape, UNIT)), tape.op("Mul", [divide_up(groups, span), ints(tape, 32)])
    end = tape.op("Sub", [tape.op("Shape", [data], {"start": 1}), steps_width])
    planes = tape.op("Slice", [data, ints(tape, 0), end, unity])
    tiles = tape.op("Shape", [data], {"start": 0, "end": 1})
    bytes_of_unit = tape.op("Div", [end, units])
    codes = tape.op("Reshape", [planes, tape.op("Concat", [tiles, units, bytes_of_unit], {"axis": 0})])
    in_places = tape.op("Reshape", [positions_of(tape, codes), ints(tape, 0, 0, 4, TILE, 4)])  # t, u, j, r, i
    in_rows = tape.op("Transpose", [in_places], {"perm": [0, 1, 2, 4, 3]})
    full_rows = tape.op("Mul", [units, ints(tape, UNIT)])
    shape = tape.op("Concat", [tiles, full_rows, ints(tape, TILE)], {"axis": 0})
    of_groups = tape.op("Slice", [tape.op("Reshape", [in_rows, shape]), ints(tape, 0), groups, unity])
    low = tape.op("Cast", [number_of(tape, "low")], {"to": ir.DataType.FLOAT})
    levels = tape.op("Add", [tape.op("Cast", [of_groups], {"to": ir.DataType.FLOAT}), low])
    halves = tape.op("Slice", [data, end, tape.op("Shape", [data], {"start": 1}), unity])
    pairs = tape.op("Reshape", [halves, tape.op("Concat", [tiles, ints(tape, -1, TILE, 2)], {"axis": 0})])
    every_group = tape.op("Range", [tape.op("Squeeze", [bound]) for bound in (ints(tape, 0), groups, unity)])
    steps = tape.op("Gather", [_floats_of_halves(tape, pairs), tape.op("Div", [every_group, span])], {"axis": 1})
    return tape.op("Mul", [levels, steps])


def _floats_of_halves(tape: ir.tape.Tape, pairs: ir.Value) -> ir.Value:
    """Return float16 numbers, uint8 [..., 2], as float [...]: sign (fraction + 1024 [exponent > 0]) 2^(exponent - 25).

    Every factor is a float32 and so is each product; no operator before opset 26 reads bits as another type.
    """
    wide = tape.op("Cast", [pairs], {"to": ir.DataType.INT32})
    lower, upper = (
        tape.op("Gather", [wide, tape.op("Constant", [], {"value_int": index})], {"axis": -1}) for index in (0, 1)
    )

    def constant(*numbers: int) -> ir.Value:
        return tape.op("Constant", [], {"value": ir.tensor(np.array(numbers, np.int32))})

    exponents = tape.op("Mod", [tape.op("Div", [upper, constant(4)]), constant(32)])
    fractions = tape.op("Add", [tape.op("Mul", [tape.op("Mod", [upper, constant(4)]), constant(256)]), lower])
    powers = np.ldexp(1.0, np.maximum(np.arange(32), 1) - 25).astype(np.float32)
    table = np.concatenate([powers, -powers])
    is_negative = tape.op("Div", [upper, constant(128)])
    indices = tape.op("Add", [exponents, tape.op("Mul", [is_negative, constant(32)])])
    units = tape.op("Gather", [tape.op("Constant", [], {"value": ir.tensor(table)}), indices], {"axis": 0})
    hidden = tape.op("Mul", [tape.op("Min", [exponents, constant(1)]), constant(1024)])
    magnitudes = tape.op("Cast", [tape.op("Add", [fractions, hidden])], {"to": ir.DataType.FLOAT})
    return tape.op("Mul", [magnitudes, units])
