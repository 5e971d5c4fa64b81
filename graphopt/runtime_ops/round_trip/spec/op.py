"""``ai.graphopt::RoundTrip``, version 1: what is left of numbers that were stored in few bits, row by row.

Input:
    x: float16, float or double [..., n], of rank 1 or more; a row is the last axis.

Attributes:
    bits: int, at least 2.
    symmetric: int, 0 or 1.
    clip: float above 0, at most 1.

Output:
    y: the type and shape of x; computed in float::

        symmetric     m = 2^(bits - 1) - 1     scale = clip * max|x| / m              offset = 0
                      codes = round((x - offset) / scale), from -m to m

        asymmetric    m = 2^bits - 1           scale = clip * (max x - min x) / m     offset = min x + cut / 2
                      codes = round((x - offset) / scale), from 0 to m                cut = (1 - clip) (max x - min x)

        y = codes * scale + offset

Ties go to even codes. Nothing gets smaller: this emulates a storage that a kernel may have one day. With ``clip`` 1
every number of a row is in reach of a code, so |x - y| <= scale / 2 but for float rounding, and a second trip changes
nothing. A smaller ``clip`` cuts the largest numbers off and gives all others a finer scale. A row with scale 0 (zeros,
or one number all along where it is asymmetric) comes back as it was.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnx_ir as ir

from graphopt.runtime_ops.operator import DOMAIN, Operator
from graphopt.runtime_ops.round_trip.spec.schema import SCHEMA

# A scale of 0 cannot divide: such a row has code 0 throughout, under any other divisor.
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


def function(opset: int) -> ir.Function:
    """Return the body, one for all bits: its attributes are references to those of the node."""
    text = _BODY.replace("DOMAIN", DOMAIN).replace("OPSET", str(opset))
    return ir.serde.deserialize_function(onnx.parser.parse_function(text))


def reference(x: npt.NDArray[np.floating], bits: int, symmetric: int, clip: float) -> npt.NDArray[np.floating]:
    """Return what the operator means, in float32 and then rounded to the type of ``x``."""
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
    values: npt.NDArray[np.floating] = codes * scale + offset
    return values.astype(x.dtype)


ROUND_TRIP = Operator(SCHEMA, function, reference)
