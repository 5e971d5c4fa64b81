"""``RoundTrip``: what is left of numbers that were stored in few bits, row by row.

A row is the last axis. For a row x of ``bits`` bits::

    symmetric     scale = clip * max|x| / m           m = 2^(bits - 1) - 1     offset = 0
                  codes = round(x / scale), from -m to m

    asymmetric    scale = clip * (max x - min x) / m  m = 2^bits - 1           offset = min x + (1 - clip) * range / 2
                  codes = round((x - offset) / scale), from 0 to m

    y = codes * scale + offset

Nothing is stored: y is as large as x, and of its type. With ``clip`` = 1 every number of the row is in reach of a code,
so |x - y| <= scale / 2 but for float32 rounding, and a second trip changes nothing. A smaller ``clip`` cuts off the
largest numbers and gives all others a finer scale; an asymmetric range is cut on both sides alike.

A row of one repeated number (of zeros, in the symmetric case) has scale 0 and comes back as it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnx_ir as ir

from graphopt.runtime_ops.operator import DOMAIN, Cost, Operator

# A scale of 0 divides nothing: such a row has code 0 throughout, under any divisor.
_BODY = """
<domain: "DOMAIN", opset_import: ["": OPSET]>
RoundTrip <bits, symmetric, clip> (x) => (y)
{
    bits = Constant <value_int: int = @bits> ()
    symmetric = Constant <value_int: int = @symmetric> ()
    clip = Constant <value_float: float = @clip> ()
    last = Constant <value_ints = [-1]> ()
    zero = Constant <value_float = 0.0> ()
    one = Constant <value_float = 1.0> ()
    two = Constant <value_float = 2.0> ()

    is_symmetric = Cast <to = 9> (symmetric)
    magnitude_bits = Sub (bits, symmetric)
    codes_above_zero = Pow (two, magnitude_bits)
    highest = Sub (codes_above_zero, one)
    mirrored = Neg (highest)
    lowest = Where (is_symmetric, mirrored, zero)

    row = Cast <to = 1> (x)
    magnitudes = Abs (row)
    largest = ReduceMax <keepdims = 1> (magnitudes, last)
    maximum = ReduceMax <keepdims = 1> (row, last)
    minimum = ReduceMin <keepdims = 1> (row, last)
    range = Sub (maximum, minimum)
    whole_span = Where (is_symmetric, largest, range)
    span = Mul (whole_span, clip)
    cut_off = Sub (whole_span, span)
    cut_off_below = Div (cut_off, two)
    begin = Add (minimum, cut_off_below)
    offset = Where (is_symmetric, zero, begin)

    scale = Div (span, highest)
    is_flat = Equal (scale, zero)
    divisor = Where (is_flat, one, scale)
    shifted = Sub (row, offset)
    steps = Div (shifted, divisor)
    nearest = Round (steps)
    codes = Clip (nearest, lowest, highest)
    scaled = Mul (codes, scale)
    rounded = Add (scaled, offset)
    y = CastLike (rounded, x)
}
"""


def _function(opset: int) -> ir.Function:
    text = _BODY.replace("DOMAIN", DOMAIN).replace("OPSET", str(opset))
    return ir.serde.deserialize_function(onnx.parser.parse_function(text))


def _reference(x: npt.NDArray[np.floating], bits: int, symmetric: int, clip: float) -> npt.NDArray[np.floating]:
    row = x.astype(np.float32)
    if symmetric:
        highest, lowest = 2 ** (bits - 1) - 1, 1 - 2 ** (bits - 1)
        span = np.abs(row).max(axis=-1, keepdims=True)
        offset = np.zeros_like(span)
    else:
        highest, lowest = 2**bits - 1, 0
        minimum = row.min(axis=-1, keepdims=True)
        span = row.max(axis=-1, keepdims=True) - minimum
        offset = minimum + (span - span * np.float32(clip)) / 2
    scale = span * np.float32(clip) / np.float32(highest)
    steps = np.divide(row - offset, scale, out=np.zeros_like(row), where=scale != 0)
    codes = np.clip(np.rint(steps), lowest, highest)
    return (codes * scale + offset).astype(x.dtype)


def _cost(shapes: Sequence[Sequence[int]]) -> Cost:
    numbers = math.prod(shapes[0])
    # Two passes: extremes (2 comparisons, 1 absolute value), then 6 operations per number; float32 in and out.
    return Cost(operations=9 * numbers, bytes=8 * numbers)


ROUND_TRIP = Operator(name="RoundTrip", version=1, function=_function, reference=_reference, cost=_cost)
