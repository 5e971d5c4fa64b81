"""``ai.graphopt::GatherTable``, version 1: columns of a matrix of codes that is packed for ``MatMulTable``.

Inputs, all of them required:
    ids: int64, of any shape: columns, from -columns to columns - 1; a negative one counts from the end, as in ONNX's
        ``Gather``. Any other is an error.
    codes: uint8 [T, U, 32 bits], T = ceil(N / 16), U = ceil(K / 16), bits = 1 to 8: as ``MatMulTable`` reads them.
    scales: float or float16 [T, G, 16], G = ceil(K / group); finite.
    table: float [entries], 1 <= entries <= 2^bits, finite. A code that is looked up and not below entries is an error.
    zero_points: the type of scales, [T, G, 16] or [1, 1, 1]: values, in units of the table. [[[0]]] is neutral.

Attributes:
    rows, columns: int, K and N.
    group: int, the rows that share a scale: a multiple of 16, or K. The last group may be shorter.
    minimums, trellis, span, low, base: as for ``MatMulTable``; optional.

Output:
    y: float [..., K], the shape of ids with an axis of rows behind it, in float32 arithmetic. Column n = ids[...] is
        lane r = n mod 16 of tile t = n div 16, row k is in group g = k div group::

        y[..., k] = (table[code[k, n]] - zero_points[t, g, r]) scales[t, g, r]
        y[..., k] = table[code[k, n]] scales[t, g, r] + zero_points[t, g, r]        where minimums is 1
        y[..., k] = (value[k, n] - zero_points[t, g, r]) scales[t, g, r]            where trellis is 1

This is bit for bit column n of the matrix that ``Dequantize`` makes of the same codes, and that ``MatMulTable``
multiplies by. So a token embedding that is tied to the lm_head is stored once, as the product reads it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.dequantize_trellis.spec.op import values_of
from graphopt.runtime_ops.gather_table.spec.body import function
from graphopt.runtime_ops.gather_table.spec.schema import SCHEMA
from graphopt.runtime_ops.matmul_table.spec.levels import numbers_of
from graphopt.runtime_ops.matmul_table.spec.packing import bits_of, confirm_base, unpack, untile
from graphopt.runtime_ops.matmul_table.spec.schema import overload
from graphopt.runtime_ops.operator import Operator

Floats = npt.NDArray[np.floating[Any]]


def reference(
    ids: npt.NDArray[np.int64],
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
) -> npt.NDArray[np.float32]:
    """Return what the operator means, float32 [..., K].

    Raises:
        ValueError: the shapes do not fit one another.
        IndexError: a column is out of range, or a code that is looked up has no entry in the table.
    """
    scales, zero_points = (numbers_of(part, rows, group, span, low) for part in (scales, zero_points))
    if scales.shape[1] != -(-rows // group):
        raise ValueError(f"{rows} rows in groups of {group} have {-(-rows // group)} scales, not {scales.shape[1]}")
    of_row = np.arange(rows) // group
    full_zeros = np.broadcast_to(zero_points, scales.shape)
    scales_GN, zeros_GN = (untile(tiles.astype(np.float32), columns) for tiles in (scales, full_zeros))
    confirm_base(codes, base)
    matrix_codes, table = unpack(codes, rows, columns), table.astype(np.float32)
    values = values_of(matrix_codes, table, bits_of(codes.shape)).T[ids] if trellis else table[matrix_codes.T[ids]]
    zeros, factors = (tiles.T[ids][..., of_row] for tiles in (zeros_GN, scales_GN))
    columns_KN: npt.NDArray[np.float32] = values * factors + zeros if minimums else (values - zeros) * factors
    return columns_KN


GATHER_TABLE = Operator(SCHEMA, function, reference, overload)
