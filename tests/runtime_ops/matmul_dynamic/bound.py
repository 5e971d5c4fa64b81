"""How far a MatMulDynamic may be from the exact product of its rotated, unrounded activations.

h = Hadamard(x) in float32 is off its exact value by at most gamma sum|x| / sqrt(a b) over its run, gamma as in
:mod:`tests.runtime_ops.matmul_table.bound` for n = a + b + 8 roundings: the sums of a and of b numbers, roots
and products. With m = clip max|h| a number within m errs by what that module derives for its levels, one beyond m by
what was cut off, |h| - m, on top. Everything behind is as there, with a table that may be rounded as for int8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.hadamard.spec.op import reference as hadamard
from graphopt.runtime_ops.matmul_dynamic.spec.op import LEVELS
from graphopt.runtime_ops.matmul_table.spec.activations import TINY
from tests.runtime_ops.matmul_table.bound import UNIT, product_bound, row_error, table_error

Floats = npt.NDArray[np.floating[Any]]
Doubles = npt.NDArray[np.float64]


def bound(
    x: Floats,
    codes: npt.NDArray[np.uint8],
    scales: Floats,
    table: Floats,
    zero_points: Floats,
    bias: Floats,
    left: npt.NDArray[np.int8],
    right: npt.NDArray[np.int8],
    rows: int,
    columns: int,
    group: int,
    bits: int,
    clip: float,
    minimums: int = 0,
) -> Doubles:
    """Return the largest |y - (Hadamard(x) W + bias)| that the definition allows.

    Returns:
        float64 [..., N]; infinite where x is not finite or a float32 may overflow.
    """
    h, turning = x.astype(np.float64), np.zeros(x.shape)
    order = len(left) * len(right)
    if order > 1:
        n = len(left) + len(right) + 8
        sums = np.abs(h).reshape(*x.shape[:-1], -1, order).sum(axis=-1, keepdims=True)
        of_run = n * UNIT / (1 - n * UNIT) * sums / np.sqrt(order)
        turning = np.broadcast_to(of_run, (*of_run.shape[:-1], order)).reshape(x.shape)
        h = hadamard(h, left, right).astype(np.float64)
    largest = np.abs(h) + turning
    m = float(np.float32(clip)) * largest.max(axis=-1, keepdims=True)
    # the m of an implementation may be smaller by what turning errs by
    slack = 2 * turning.max(axis=-1, keepdims=True)
    cut_off = np.maximum(largest - m + slack, 0) if clip < 1 else 0.0
    error_within = row_error(largest, m, LEVELS[bits])
    error = turning + cut_off + np.where(m - slack < 2 * TINY, largest + error_within, error_within)
    table_off = table_error(table, "int8")
    sizes, levels = (rows, columns, group), LEVELS[bits]
    return product_bound(
        h, error, codes, scales, table, table_off, zero_points, bias, *sizes, minimums=minimums, levels=levels
    )
