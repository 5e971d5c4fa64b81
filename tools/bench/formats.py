"""Weights rounded to a table in groups, as every engine but ggml is given them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from tools.bench.problem import Array, Problem

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def minifloat(exponent_bits: int, mantissa_bits: int) -> tuple[float, ...]:
    """Return the values of a small float without infinities in the order of its codes: sign, exponent, mantissa."""
    bias = 2 ** (exponent_bits - 1) - 1
    magnitudes = [
        2.0 ** (max(exponent, 1) - bias) * ((exponent > 0) + mantissa / 2**mantissa_bits)
        for exponent in range(2**exponent_bits)
        for mantissa in range(2**mantissa_bits)
    ]
    return (*magnitudes, *(-magnitude for magnitude in magnitudes))


TABLES: dict[str, tuple[float, ...]] = {
    "int2": (-2.0, -1.0, 0.0, 1.0),
    "int4": tuple(map(float, range(-8, 8))),
    "int8": tuple(map(float, range(-128, 128))),
    "nf4": _NF4,
    "fp6": minifloat(2, 3),
    "fp6-e3m2": minifloat(3, 2),
}
"""The value of each code; integers ascend, so that a code is an integer plus half the number of codes."""


@dataclass(frozen=True)
class Rounded:
    """A matrix as codes and scales: W[n, k] = table[codes[n, k]] scales[n, k div group].

    Attributes:
        codes: uint8 [outer, inner].
        scales: float16 [outer, groups].
        table: float64 [entries].
        bits: bits of a code.
        group: columns that share a scale.
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]
    table: npt.NDArray[np.float64]
    bits: int
    group: int

    def product(self, x: Array) -> npt.NDArray[np.float64]:
        """Return x W^T in float64, [rows, outer]."""
        W = self.table[self.codes].reshape(*self.scales.shape, self.group)
        W *= self.scales[..., None].astype(np.float64)
        y: npt.NDArray[np.float64] = x.astype(np.float64) @ W.reshape(self.codes.shape).T
        return y


def rounded(problem: Problem, name: str, group: int) -> Rounded:
    """Return the problem's weights in the format called ``name``, in groups scaled by their largest."""
    return problem.weights.keep((name, group), partial(_round, problem.weights.values, name, group))


def _round(values: npt.NDArray[np.float32], name: str, group: int) -> Rounded:
    table = np.array(TABLES[name])
    order = np.argsort(table, kind="stable")
    # The smaller end: int4 has no +8, and a value must not be cut off.
    limit = np.float32(min(-table.min(), table.max()))
    grouped = values.reshape(len(values), -1, group)
    scales = (np.abs(grouped).max(axis=2) / limit).astype(np.float16)
    targets = grouped / scales[..., None].astype(np.float32)
    middles = ((table[order][1:] + table[order][:-1]) / 2).astype(np.float32)
    if np.all(np.diff(table) == 1):
        codes = np.clip(np.rint(targets) - np.float32(table[0]), 0, len(table) - 1).astype(np.uint8)
    else:
        codes = order.astype(np.uint8)[np.searchsorted(middles, targets)]
    return Rounded(codes.reshape(values.shape), scales, table, (len(table) - 1).bit_length(), group)
