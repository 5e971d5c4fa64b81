"""How far a MatMulTable may be from the exact product of its inputs, derived from its definition.

Write x' for the rounded x, t' for the rounded table, W = (t - z) c for the weight with its scales c and zero points z,
and u = 2^-24. An implementation that keeps to the definition computes the sum over k of x' (t' - z) c, plus the bias,
with sums that are exact or of float32, in any order. Its distance to x W + bias is at most

    sum |x - x'| |W|                     what rounding x costs,
  + sum |x'| |t - t'| |c|                what rounding the table costs,
  + gamma (sum |x'| (|t'| + |z|) |c| + |bias|)      what float32 costs, gamma = n u / (1 - n u),

where each term of the last line meets at most n = K + G + 8 roundings: K - 1 additions within groups, G across them and
with the bias, and one each for x', t' - z, W or s c, their product, z times a sum, and its subtraction (Higham 2002,
Accuracy and stability, lemma 3.1: n relative errors of at most u are one of gamma). |t'| + |z| stands where |t' - z|
might: z may be taken off after the sums. Minimums m take the same roundings: |t'| |c| + |m| stands in its place.

int8 and int16: let L be the levels and m = max|x| over the group. q is round(v') with v' = fl(x fl(L / m)), which is
off x L / m by at most 2.01 u L as |x| <= m, so |x L / m - q| <= 1/2 + 2.01 u L. s = fl(m / L) is off m / L by a share
of u, and |q| <= L. Together |x - q s| <= s (1/2 + 4 u L), or |x| where m < 1e-30 and q = 0. The table costs nothing
where its numbers are multiples of one step, else half of max|t| / 32767.

uint4: the same with w for m. high and -low are L steps together but for a share of u, and z is off -low by
1/2 + 2.01 u L steps, so high is at most 1/2 + 3.01 u L beyond the last code; 4 u L more hold this and w itself.

bfloat16 has 8 significant bits: |x - x'| <= 2^-8 |x|, and so for t. float32 rounds neither.

Underflow: an operation whose result is below 2^-126 may return 0 and so err by 2^-126 once more. What multiplies that
error afterwards is below (1 + max|x| + 32767 L) (1 + max|c|). Overflow: where the sum of the terms' magnitudes comes
near the largest float32, nothing is promised.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from graphopt.numerics.formats.steps import integer_step
from graphopt.runtime_ops.matmul_table.spec.activations import LEVELS, TINY, WITH_ZERO_POINTS
from graphopt.runtime_ops.matmul_table.spec.op import dequantize

Floats = npt.NDArray[np.floating[Any]]
Doubles = npt.NDArray[np.float64]

UNIT = 2.0**-24
"""Half of the distance between 1 and the next float32."""

TENSOR_CORE_UNIT = 2.0**-23
"""What an addition costs on a GPU's tensor cores, as a share of the terms' magnitudes.

They add 8 products or more to a sum at once (sm_80: 8), cut each of the numbers below 2^-24 of the largest and the
result to a float (Fasi et al. 2021, Numerical behavior of NVIDIA tensor cores). That is 9 times 2^-24 and once 2^-23
for 8 additions, less than 8 times 2^-23; with more at once it is less."""

_SMALLEST = 2.0**-126
_TABLE_LEVELS = 2**15 - 1


def bound(
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
    unit: float = UNIT,
) -> Doubles:
    """Return the largest |y - (x W + bias)| that the definition allows, with x as it was before rounding.

    Returns:
        float64 [..., N]; infinite where x is not finite or a float32 may overflow.
    """
    error = activation_error(x, group, activations)
    table_off = table_error(table, activations)
    levels = LEVELS.get(activations, 0)
    weight, sizes = (codes, scales, table, table_off, zero_points, bias), (rows, columns, group)
    return product_bound(x, error, *weight, *sizes, minimums=minimums, levels=levels, unit=unit)


def activation_error(x: Floats, group: int, activations: str) -> Doubles:
    """Return the largest |x - x'| for each number of ``x``, float64."""
    magnitude = np.abs(x.astype(np.float64))
    if activations == "float32":
        return np.zeros_like(magnitude)
    if activations == "bfloat16":
        return magnitude * 2.0**-8 + _SMALLEST
    levels, error = LEVELS[activations], np.empty_like(magnitude)
    for start in range(0, x.shape[-1], group):
        columns = slice(start, start + group)
        if activations in WITH_ZERO_POINTS:
            numbers = x[..., columns].astype(np.float64)
            w = np.maximum(numbers.max(-1, keepdims=True), 0) - np.minimum(numbers.min(-1, keepdims=True), 0)
            error[..., columns] = row_error(magnitude[..., columns], w, levels) + 4 * UNIT * w
            continue
        m = magnitude[..., columns].max(axis=-1, keepdims=True)
        error[..., columns] = row_error(magnitude[..., columns], m, levels)
    return error


def row_error(magnitude: Doubles, m: Doubles, levels: int) -> Doubles:
    """Return the largest |x - q s| for |x| <= m, for each number of rows of ``magnitude``."""
    return np.where(m < TINY, magnitude, m / levels * (0.5 + 4 * UNIT * levels))


def table_error(table: Floats, activations: str) -> Doubles:
    """Return the largest |t - t'| for each number of ``table``, float64."""
    magnitude = np.abs(table.astype(np.float64))
    if activations == "bfloat16":
        return magnitude * 2.0**-8 + _SMALLEST
    if activations == "float32" or integer_step(table.tolist(), _TABLE_LEVELS) is not None:
        return np.zeros_like(magnitude)
    # half a step, and a share of u for a step and a product that are rounded
    return np.full_like(magnitude, magnitude.max() * (0.5 / _TABLE_LEVELS + 2 * UNIT))


def product_bound(
    x: Floats,
    error: Doubles,
    codes: npt.NDArray[np.uint8],
    scales: Floats,
    table: Floats,
    table_off: Doubles,
    zero_points: Floats,
    bias: Floats,
    rows: int,
    columns: int,
    group: int,
    *,
    minimums: int = 0,
    levels: int,
    unit: float = UNIT,
) -> Doubles:
    """Return the bound of :func:`bound` for an x' that is within ``error`` [..., K] of x and a table within its own.

    An addition errs by a share of ``unit`` at most: :data:`UNIT`, or :data:`TENSOR_CORE_UNIT`.
    """
    shape, size = (rows, columns, group), np.abs(scales.astype(np.float64))
    weight = np.abs(dequantize(codes, scales, table, zero_points, *shape, minimums))
    weight_off = dequantize(codes, size, table_off, np.zeros((1, 1, 1)), *shape)
    magnitudes = np.abs(zero_points) if minimums else -np.abs(zero_points)
    terms = dequantize(codes, size, np.abs(table) + table_off, magnitudes, *shape, minimums)
    n = rows + len(range(0, rows, group)) + 8
    gamma = n * unit / (1 - n * unit)
    largest = np.abs(x.astype(np.float64)) + error
    with np.errstate(invalid="ignore", over="ignore"):
        magnitude = largest @ terms + np.abs(bias.astype(np.float64))
        reach = largest.max(axis=-1, keepdims=True, initial=0) + _TABLE_LEVELS * levels
        underflow = n * _SMALLEST * (1 + reach) * (1 + size.max())
        limit = error @ weight + largest @ weight_off + gamma * magnitude + underflow
    fits = magnitude < np.finfo(np.float32).max / 4
    return np.where(fits & np.isfinite(x).all(axis=-1, keepdims=True), limit, np.inf)
