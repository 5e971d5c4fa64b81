"""``ai.graphopt::MatMulTable``, version 1: a product with a weight whose codes are looked up in a table.

Inputs, all of them required:
    x: float or float16 [..., K], of rank 1 or more.
    codes: uint8 [T, U, 32 bits], T = ceil(N / 16), U = ceil(K / 16), bits = 1 to 8; see :mod:`.packing`.
    scales: float or float16 [T, G, 16], G = ceil(K / group); finite.
    table: float [entries], 1 <= entries <= 2^bits, finite. A code that is not below entries is an error.
    zero_points: the type of scales, [T, G, 16] or [1, 1, 1]: values, in units of the table. [[[0]]] is neutral.
    bias: float [N], or [1], where [0] is neutral.

Attributes:
    rows, columns: int, K and N.
    group: int, the rows that share a scale: a multiple of 16, or K. The last group may be shorter.
    activations: string, what x is rounded to, below.
    minimums: int, 1 where zero_points are minimums, in units of W and not of the table; optional, else 0.
    trellis: int, 1 where codes of 2 to 6 bits are those of a trellis; optional, else 0, and 0 beside minimums. The
        table is float [2, entries] then, entries = max(16, 2^bits), and the value of a code is what
        ``DequantizeTrellis`` says, before it is scaled. Each sum of a number of the first row and one of the second is
        a multiple, of 127 at most, of one power of two from 2^-16 to 2^16, and each number a multiple of 32767 at most.

    span, low: int, 8 or 16 where scales and zero_points are in two levels, and the integer of code 0, -128 to 0;
        optional, else span is 0. Both are uint8 [T, B] then, see :mod:`.levels`; zero_points [[0]] are neutral.
    base: int, 3 where codes are 0, 1 and 2, stored as digits of base 3; optional, else 0, and 0 beside trellis. codes
        are uint8 [T, U, 52] then, see :mod:`.packing`, and table has 3 numbers at least. There is no kernel for GPUs.

Output:
    y: the type of x, [..., N]. Column n is lane r = n mod 16 of tile t = n div 16, row k is in group g = k div group::

        W[k, n] = (table[code[k, n]] - zero_points[t, g, r]) scales[t, g, r]
        W[k, n] = table[code[k, n]] scales[t, g, r] + zero_points[t, g, r]        where minimums is 1
        W[k, n] = (value[k, n] - zero_points[t, g, r]) scales[t, g, r]            where trellis is 1
        y = round(x) W + bias

    float32    round(x) = x
    bfloat16   x to the nearest, ties to even; the numbers of the table as well
    int8       q s with s = m / 127, m = max|x| of a row of x within a group, q = round(x (127 / m)), ties to even
    int16      the same with 16256 in place of 127
    uint4      q s with s = w / 15, w = high - low, low = min(0, min x), high = max(0, max x) of a row of x within a
               group, z = round(-low (15 / w)), q = round(x (15 / w)), ties to even, from -z to 15 - z: codes q + z of
               4 bits with the zero point z. There is no kernel for GPUs

    Where m or w < 1e-30, q is 0. A number that is not finite makes all products of its group NaN. All of this is
    arithmetic of float32. Sums are exact or of float32, in any order. Under integers a kernel may also round the table
    to multiples of max|table| / 32767, unless its numbers are multiples, of 32767 at most, of one step. The bound on
    what all of this does to y is in ``tests/runtime_ops/matmul_table/bound.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.dequantize_trellis.spec.op import values_of
from graphopt.runtime_ops.matmul_table.spec.activations import round_activations, to_bfloat16
from graphopt.runtime_ops.matmul_table.spec.body import function
from graphopt.runtime_ops.matmul_table.spec.levels import numbers_of
from graphopt.runtime_ops.matmul_table.spec.packing import bits_of, confirm_base, unpack, untile
from graphopt.runtime_ops.matmul_table.spec.schema import SCHEMA, overload
from graphopt.runtime_ops.operator import Operator

Floats = npt.NDArray[np.floating[Any]]
Doubles = npt.NDArray[np.float64]


def reference(
    x: Floats,
    codes: npt.NDArray[np.uint8],
    scales: Floats,
    table: Floats,
    zero_points: Floats,
    bias: Floats,
    rows: int,
    columns: int,
    group: int,
    activations: str,
    minimums: int = 0,
    trellis: int = 0,
    span: int = 0,
    low: int = 0,
    base: int = 0,
) -> Doubles:
    """Return what the operator means: x rounded in float32 arithmetic, everything behind it in float64.

    Returns:
        float64 [..., N].

    Raises:
        ValueError: the shapes do not fit one another, or there is no such rounding of activations.
        IndexError: a code has no entry in the table.
    """
    products = round_activations(x, group, activations)
    if activations == "bfloat16" and not trellis:
        table = to_bfloat16(table)
    weight = dequantize(codes, scales, table, zero_points, rows, columns, group, minimums, trellis, span, low, base)
    with np.errstate(invalid="ignore"):  # x that is not finite makes y not finite
        y: Doubles = products @ weight + bias.astype(np.float64)
    return y


def dequantize(
    codes: npt.NDArray[np.uint8],
    scales: Floats,
    table: Floats,
    zero_points: Floats,
    rows: int,
    columns: int,
    group: int,
    minimums: int = 0,
    trellis: int = 0,
    span: int = 0,
    low: int = 0,
    base: int = 0,
) -> Doubles:
    """Return the weight [K, N] that the operator's inputs stand for, exact but for the rounding of float64."""
    scales, zero_points = (numbers_of(part, rows, group, span, low) for part in (scales, zero_points))
    scales_GN = untile(scales.astype(np.float64), columns)
    zeros_GN = untile(np.broadcast_to(zero_points.astype(np.float64), scales.shape), columns)
    if len(scales_GN) != -(-rows // group):
        raise ValueError(f"{rows} rows in groups of {group} have {-(-rows // group)} scales, not {len(scales_GN)}")
    of_row = np.arange(rows) // group
    confirm_base(codes, base)
    indices = unpack(codes, rows, columns)
    values = values_of(indices, table, bits_of(codes.shape)) if trellis else table.astype(np.float64)[indices]
    zeros, factors = zeros_GN[of_row], scales_GN[of_row]
    weight: Doubles = values * factors + zeros if minimums else (values - zeros) * factors
    return weight


MATMUL_TABLE = Operator(SCHEMA, function, reference, overload)
