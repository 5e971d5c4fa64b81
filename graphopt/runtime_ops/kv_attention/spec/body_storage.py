"""Pages in the body of ``KVAttention``: the layout and rounding of ``layout.py``, as nodes.

Shapes: B rows, n pages, H KV heads, T tokens of a page, D channels. Constants are written as Python numbers.
"""

# onnxscript's builder makes operators by name, so its values have no static type.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.runtime_ops.kv_attention.spec.attributes import LANES, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.layout import LARGEST_SCALE, SQUARE_STEPS, TINY
from graphopt.runtime_ops.tape import ints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onnxscript import OpBuilder

    from graphopt.runtime_ops.kv_attention.spec.storages import Storage


def packed_keys(op: OpBuilder, page: ir.Value, attrs: KVAttributes) -> ir.Value:
    """Return pages [.., .., .., T, D], floats or codes, as they are stored, [.., .., .., numbers or bytes]."""
    if attrs.levels is not None:
        return _packed_codes(op, page, attrs.page // LANES, -1, attrs.stored)
    blocks = op.Reshape(page, [0, 0, 0, attrs.page // LANES, LANES, -1])
    return _stored_floats(op, op.Transpose(blocks, perm=[0, 1, 2, 3, 5, 4]), attrs)


def packed_values(op: OpBuilder, page: ir.Value, attrs: KVAttributes) -> ir.Value:
    """Return pages as they are stored, see :func:`packed_keys`."""
    if attrs.levels is not None:
        transposed = op.Transpose(page, perm=[0, 1, 2, 4, 3])
        storage = attrs.stored_values
        return _packed_codes(op, transposed, -1, attrs.page // storage.unit, storage)
    return _stored_floats(op, page, attrs)


def unpacked_keys(op: OpBuilder, packed: ir.Value, attrs: KVAttributes) -> ir.Value:
    """Return stored keys as float [.., .., .., T, D]: the numbers, or codes."""
    if attrs.levels is not None:
        blocks = _unpacked_codes(op, packed, attrs.page // LANES, -1, attrs.stored)
        codes = op.Reshape(blocks, [0, 0, 0, attrs.page, -1])
        return op.Cast(codes, to=ir.DataType.FLOAT)
    numbers = op.Cast(packed, to=ir.DataType.FLOAT)
    blocks = op.Reshape(numbers, [0, 0, 0, attrs.page // LANES, -1, LANES])
    return op.Reshape(op.Transpose(blocks, perm=[0, 1, 2, 3, 5, 4]), [0, 0, 0, attrs.page, -1])


def unpacked_values(op: OpBuilder, packed: ir.Value, attrs: KVAttributes) -> ir.Value:
    """Return stored values as float [.., .., .., T, D]: the numbers, or codes."""
    if attrs.levels is not None:
        storage = attrs.stored_values
        blocks = _unpacked_codes(op, packed, -1, attrs.page // storage.unit, storage)
        codes = op.Transpose(op.Reshape(blocks, [0, 0, 0, -1, attrs.page]), perm=[0, 1, 2, 4, 3])
        return op.Cast(codes, to=ir.DataType.FLOAT)
    return op.Reshape(op.Cast(packed, to=ir.DataType.FLOAT), [0, 0, 0, attrs.page, -1])


def as_stored(op: OpBuilder, numbers: ir.Value, attrs: KVAttributes) -> ir.Value:
    """Return float numbers as a storage of floats gives them back."""
    if attrs.stored.dtype == np.float32:
        return numbers
    return op.Cast(op.Cast(numbers, to=_type(attrs)), to=ir.DataType.FLOAT)


def round_numbers(
    op: OpBuilder, page: ir.Value, axis: int, levels: int, clip: float
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return codes uint8, and low and step, float, with an ``axis`` of 1; see ``round_page``."""
    low, step, inverse = _page_steps(op, page, axis, levels, clip)
    return _codes(op, page, low, inverse, levels), low, step


def round_with_feedback(
    op: OpBuilder, keys: ir.Value, feedback: ir.Value, channels: ir.Value, levels: int, clip: float
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return codes uint8 of keys [B, n, H, T, D], and low and step with one token; see ``layout.py``.

    Args:
        op: takes the nodes.
        keys: float [B, n, H, T, D].
        feedback: float16 [H, D, D].
        channels: int64 [1], D.
        levels: the largest code.
        clip: of the set, as for :func:`round_numbers`.
    """
    low, step, inverse = _page_steps(op, keys, -2, levels, clip)
    by_channel = [op.Transpose(op.Squeeze(x, [-2]), perm=[3, 0, 1, 2]) for x in (low, step, inverse)]  # D, B, n, H
    return _round_channels(op, keys, feedback, channels, by_channel, levels), low, step


def _round_channels(
    op: OpBuilder, keys: ir.Value, feedback: ir.Value, channels: ir.Value, scales: Sequence[ir.Value], levels: int
) -> ir.Value:
    """Return codes uint8 of keys [B, n, H, T, D] by low, step and inverse step [D, B, n, H]."""
    rows = op.Transpose(op.Cast(feedback, to=ir.DataType.FLOAT), perm=[1, 0, 2])  # D, H, D
    body = _feedback_step(levels, *scales, rows)
    goes_on = op.Cast(op.Constant(value_int=1), to=ir.DataType.BOOL)
    _, codes = op.Loop(op.Squeeze(channels, [0]), goes_on, keys, body=body, _outputs=2)
    return op.Cast(op.Transpose(codes, perm=[1, 2, 3, 4, 0]), to=ir.DataType.UINT8)


def _feedback_step(levels: int, *of_channels: ir.Value) -> ir.Graph:
    """Return what is done for a channel: keys [B, n, H, T, D] to those behind it, and its codes [B, n, H, T] as floats.

    Args:
        levels: the largest code.
        of_channels: low, step and inverse step [D, B, n, H], and feedback [D, H, D].
    """
    index, goes_on, keys = (
        ir.val(f"channel_{name}", kind, shape)
        for name, kind, shape in (
            ("index", ir.DataType.INT64, []),
            ("on", ir.DataType.BOOL, []),
            ("keys", ir.DataType.FLOAT, [None] * 5),
        )
    )
    tape = ir.tape.Tape()
    low, step, inverse, row = (tape.op("Gather", [tensor, index], {"axis": 0}) for tensor in of_channels)
    low, step, inverse = (tape.op("Unsqueeze", [x, ints(tape, -1)]) for x in (low, step, inverse))
    x = tape.op("Gather", [keys, index], {"axis": 4})
    steps = tape.op("Mul", [tape.op("Sub", [x, low]), inverse])
    zero, largest = (tape.op("Constant", [], {"value_float": float(number)}) for number in (0, levels))
    steps = tape.op("Where", [tape.op("IsNaN", [steps]), zero, steps])
    codes = tape.op("Clip", [tape.op("Round", [steps]), zero, largest])
    error = tape.op("Sub", [x, tape.op("Add", [low, tape.op("Mul", [step, codes])])])
    is_bad = tape.op("IsNaN", [tape.op("Mul", [error, zero])])  # x 0 is 0 for finite x and NaN otherwise
    error = tape.op("Where", [is_bad, zero, error])
    change = tape.op("Mul", [tape.op("Unsqueeze", [error, ints(tape, -1)]), tape.op("Unsqueeze", [row, ints(tape, 1)])])
    outputs = [tape.op("Identity", [goes_on]), tape.op("Sub", [keys, change]), codes]
    for number, node in enumerate(tape.nodes):
        node.outputs[0].name = f"channel_{number}"
    return ir.Graph([index, goes_on, keys], outputs, nodes=tape.nodes, name="channel")


def factors_of_tokens(op: OpBuilder, keys: ir.Value, channels: ir.Value) -> ir.Value:
    """Return factors [.., T, 1] of keys [.., T, D], whose D is ``channels``, int64 [1]; see ``layout.py``."""
    # maxima may lose a NaN; x 0 is 0 for finite x and NaN otherwise
    is_bad = op.IsNaN(op.ReduceSum(op.Mul(keys, 0.0), [-2, -1], keepdims=1))
    magnitude = op.Abs(op.Where(is_bad, 0.0, keys))
    largest = op.ReduceMax(magnitude, [-2], keepdims=1)
    shares = op.Div(magnitude, op.Where(op.Greater(largest, 0.0), largest, 1.0))
    squares = op.Round(op.Mul(op.Mul(shares, shares), float(SQUARE_STEPS)))
    total = op.ReduceSum(squares, [-1], keepdims=1)
    steps = op.Cast(op.Mul(channels, SQUARE_STEPS), to=ir.DataType.FLOAT)
    return _as_float16(op, op.Where(op.Greater(total, 0.0), op.Sqrt(op.Div(total, steps)), 1.0))


def rounded_tokens(
    op: OpBuilder, tokens: ir.Value, levels: int, feedback: ir.Value | None = None
) -> tuple[ir.Value, ir.Value]:
    """Return codes uint8 of tokens [..., D], and scales with an axis of 1; see ``round_tokens``.

    Args:
        op: takes the nodes.
        tokens: float [..., D]; with ``feedback`` [T, H, D].
        levels: the largest code.
        feedback: float16 [H, D, D]; ``None`` for none.
    """
    magnitude = op.ReduceMax(op.Abs(tokens), [-1], keepdims=1)
    low = op.Neg(magnitude)
    low, step, inverse = _token_steps(op, tokens, low, op.Sub(magnitude, low), levels)
    if feedback is None:
        codes = _codes(op, tokens, low, inverse, levels)
    else:
        channels = op.Shape(tokens, start=2)
        # T, H, 1 as D, T, 1, H
        by_token = [op.Transpose(op.Unsqueeze(x, [0]), perm=[3, 1, 0, 2]) for x in (low, step, inverse)]
        shape = op.Concat(channels, [1, 1, 1], axis=0)
        by_channel = [op.Expand(x, shape) for x in by_token]
        codes = op.Squeeze(
            _round_channels(op, op.Unsqueeze(tokens, [1, 3]), feedback, channels, by_channel, levels), [1, 3]
        )
    return codes, op.Where(op.IsNaN(low), low, step)


def _page_steps(
    op: OpBuilder, page: ir.Value, axis: int, levels: int, clip: float
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return low, step and inverse step of each set, float with an ``axis`` of 1: NaN, 0 and 0 where not finite."""
    first, last = op.ReduceMin(page, [axis], keepdims=1), op.ReduceMax(page, [axis], keepdims=1)
    whole = op.Sub(last, first)
    is_bad = _is_not_finite(op, page, whole, axis)
    if clip < 1:
        margin = op.Mul(whole, float(np.float32((1 - clip) / 2)))
        first, last = op.Add(first, margin), op.Sub(last, margin)
    first, last = op.Where(is_bad, 0.0, first), op.Where(is_bad, 0.0, last)
    low = _scales_below(op, first)
    step = op.Div(op.Sub(last, low), float(levels))
    step = op.Neg(_scales_below(op, op.Neg(op.Max(step, 0.0))))  # rounded up
    is_flat = op.Equal(step, 0.0)
    inverse = op.Where(is_flat, 0.0, op.Div(1.0, op.Where(is_flat, 1.0, step)))
    return op.Where(is_bad, math.nan, low), step, inverse


def _scales_below(op: OpBuilder, numbers: ir.Value) -> ir.Value:
    """Return the largest float16 at or below each number, as float; see ``scales_below`` of ``layout.py``."""
    inside = op.Clip(numbers, -LARGEST_SCALE, LARGEST_SCALE)
    nearest = _as_float16(op, inside)
    # 0.7 to 1.4 steps of float16 below that: what is nearest to this is the number before it
    gap = op.Mul(op.Max(op.Abs(nearest), 2.0**-14), 0.7 * 2.0**-10)
    return op.Where(op.Greater(nearest, inside), _as_float16(op, op.Sub(nearest, gap)), nearest)


def _as_float16(op: OpBuilder, numbers: ir.Value) -> ir.Value:
    """Return numbers rounded to the nearest float16, as float."""
    return op.Cast(op.Cast(numbers, to=ir.DataType.FLOAT16), to=ir.DataType.FLOAT)


def _is_not_finite(op: OpBuilder, numbers: ir.Value, span: ir.Value, axis: int) -> ir.Value:
    """Return which sets have a number that is not finite, or span what is not, with an ``axis`` of 1."""
    # minima and maxima may lose a NaN; x 0 is 0 for finite x and NaN otherwise
    return op.IsNaN(op.Add(op.ReduceSum(op.Mul(numbers, 0.0), [axis], keepdims=1), op.Mul(span, 0.0)))


def _token_steps(
    op: OpBuilder, tokens: ir.Value, low: ir.Value, span: ir.Value, levels: int
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return low, step and inverse step of tokens: NaN, 0 and 0 where one is not finite."""
    is_bad = _is_not_finite(op, tokens, span, -1)
    is_flat = op.Or(is_bad, op.Less(span, float(TINY)))
    divisor = op.Where(is_flat, 1.0, span)
    step, inverse = op.Div(divisor, float(levels)), op.Div(float(levels), divisor)
    return op.Where(is_bad, math.nan, low), op.Where(is_flat, 0.0, step), op.Where(is_flat, 0.0, inverse)


def _codes(op: OpBuilder, numbers: ir.Value, low: ir.Value, inverse: ir.Value, levels: int) -> ir.Value:
    """Return the nearest codes, uint8; 0 where low is NaN."""
    steps = op.Mul(op.Sub(numbers, low), inverse)
    steps = op.Where(op.IsNaN(steps), 0.0, steps)
    return op.Cast(op.Clip(op.Round(steps), 0.0, float(levels)), to=ir.DataType.UINT8)


def restore_numbers(op: OpBuilder, codes: ir.Value, low: ir.Value, step: ir.Value) -> ir.Value:
    """Return the numbers that codes stand for, as float."""
    return op.Add(low, op.Mul(step, codes))


def _stored_floats(op: OpBuilder, page: ir.Value, attrs: KVAttributes) -> ir.Value:
    flat = op.Reshape(page, [0, 0, 0, -1])
    return flat if attrs.stored.dtype == np.float32 else op.Cast(flat, to=_type(attrs))


def _type(attrs: KVAttributes) -> ir.DataType:
    """Return the type that a storage of floats is cast to, which saturates where the type has no infinity."""
    return ir.DataType.from_numpy(attrs.stored.dtype)


def _packed_codes(op: OpBuilder, codes: ir.Value, blocks: int, units: int, storage: Storage) -> ir.Value:
    """Pack codes [.., lanes, summed]: ``blocks`` of 16 lanes and ``units`` of what is summed over, one of them -1."""
    unit = storage.unit
    split = op.Reshape(codes, [0, 0, 0, blocks, LANES, units, unit // 4, 4])
    fours = op.Transpose(split, perm=[0, 1, 2, 3, 5, 6, 4, 7])
    planes, shift = [], 0
    for bits in storage.planes:
        plane = op.BitwiseAnd(_shifted_right(op, fours, shift), 2**bits - 1) if bits < storage.bits else fours
        if bits < 8:
            # [.., units, lines, fours of a byte, 16, 4]
            parts = op.Reshape(plane, [0, 0, 0, blocks, units, unit // 4 * bits // 8, 8 // bits, LANES, 4])
            plane, *upper = op.Split(parts, axis=6, num_outputs=8 // bits, _outputs=8 // bits)
            for field, part in enumerate(upper, 1):
                plane = op.BitwiseOr(plane, op.BitShift(part, field * bits, direction="LEFT"))
            plane = op.Squeeze(plane, [6])
        planes.append(plane)
        shift += bits
    return op.Reshape(planes[0] if len(planes) == 1 else op.Concat(*planes, axis=5), [0, 0, 0, -1])


def _unpacked_codes(op: OpBuilder, codes: ir.Value, blocks: int, units: int, storage: Storage) -> ir.Value:
    """Return codes as blocks [.., lanes / 16, 16, units, fours, 4]; arguments of :func:`_packed_codes`."""
    unit, planes = storage.unit, storage.planes
    counts = [unit // 4 * bits // 8 for bits in planes]
    lines = op.Reshape(codes, [0, 0, 0, blocks, units, sum(counts), LANES, 4])
    parts = [lines] if len(planes) == 1 else op.Split(lines, counts, axis=5, _outputs=len(planes))
    total, shift = None, 0
    for bits, count, part in zip(planes, counts, parts, strict=True):
        plane = part
        if bits < 8:
            bytes_of_plane = op.Reshape(part, [0, 0, 0, blocks, units, count, 1, LANES, 4])
            firsts = range(0, 8, bits)
            fields = [op.BitwiseAnd(_shifted_right(op, bytes_of_plane, first), 2**bits - 1) for first in firsts]
            plane = op.Reshape(op.Concat(*fields, axis=6), [0, 0, 0, blocks, units, unit // 4, LANES, 4])
        if shift:
            plane = op.BitShift(plane, shift, direction="LEFT")
        total = plane if total is None else op.BitwiseOr(total, plane)
        shift += bits
    return op.Transpose(total, perm=[0, 1, 2, 3, 6, 4, 5, 7])


def _shifted_right(op: OpBuilder, codes: ir.Value, bits: int) -> ir.Value:
    return op.BitShift(codes, bits, direction="RIGHT") if bits else codes
