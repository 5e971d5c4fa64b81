"""Round to nearest, in groups along the axis that a product sums over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from graphopt.formats.table import Codes, TableFormat
from graphopt.weights import blocks_of

Doubles = npt.NDArray[np.float64]

# Shares of the extreme that the search for the least squared error tries.
_SHARES = np.linspace(1.0, 0.6, 17)


@dataclass(frozen=True)
class Quantized:
    """Codes of a matrix [rows, columns], and per group of rows a scale and perhaps a zero point.

    Attributes:
        format: what the codes mean.
        codes: uint8 [rows, columns].
        scales: float32 [groups, columns].
        zero_points: uint8 [groups, columns], the code that means 0, or ``None``.
    """

    format: TableFormat
    codes: Codes
    scales: npt.NDArray[np.float32]
    zero_points: Codes | None

    def dequantize(self) -> Doubles:
        """Return the matrix that the codes stand for: (value(code) - value(zero point)) scale, [rows, columns]."""
        groups, columns = self.scales.shape
        values = self.format.decode(self.codes).reshape(groups, -1, columns)
        if self.zero_points is not None:
            values = values - self.format.decode(self.zero_points)[:, None]
        return (values * self.scales[:, None]).reshape(-1, columns)


def round_to_nearest(
    matrix: npt.NDArray[Any], table: TableFormat, group: int | None, scale: Literal["extreme", "least_squares"]
) -> Quantized:
    """Choose the code nearest to each weight.

    Without a zero point a group's scale maps its largest magnitude to the format's limit; with one, its range is mapped
    to the whole table. ``least_squares`` tries smaller ranges and keeps the one with the least squared error, group by
    group (QuaRot, Ashkboos et al. 2024, section 5, finds its clipping ratios by such a linear search).

    Args:
        matrix: [rows, columns], rows are what a product sums over.
        table: the format.
        group: rows that share a scale; ``None`` for all of them.
        scale: how the scale is chosen. Without a zero point, ``extreme`` errs by at most half a step everywhere; a zero
            point is itself rounded, which costs up to half a step more.

    Raises:
        ValueError: the rows are no multiple of ``group``.
    """
    rows, columns = matrix.shape
    group = group or rows
    if rows % group:
        raise ValueError(f"{rows} rows cannot be cut into groups of {group}")
    codes = np.empty((rows, columns), np.uint8)
    scales = np.empty((rows // group, columns), np.float32)
    zero_points = np.empty((rows // group, columns), np.uint8)
    for block in blocks_of(matrix.shape, 0):
        groups = np.asarray(matrix[block], np.float64).reshape(rows // group, group, -1)
        chosen, scales[block], zero_points[block] = _choose(groups, table, scale)
        codes[block] = chosen.reshape(rows, -1)
    return Quantized(table, codes, scales, zero_points if table.zero_point else None)


Attempt = tuple[npt.NDArray[Any], ...]


def _choose(groups: Doubles, table: TableFormat, scale: Literal["extreme", "least_squares"]) -> Attempt:
    """Return codes [groups, group, columns], scales and zero points [groups, columns] for ``groups``."""
    best = _attempt(groups, table, 1.0)
    if scale == "extreme":
        return best
    error = _squared_error(groups, table, best)
    for share in _SHARES[1:]:
        trial = _attempt(groups, table, float(share))
        trial_error = _squared_error(groups, table, trial)
        better = trial_error < error
        error = np.where(better, trial_error, error)
        best = tuple(
            np.where(better[:, None] if old.ndim == 3 else better, new, old)
            for old, new in zip(best, trial, strict=True)
        )
    return best


def _attempt(groups: Doubles, table: TableFormat, share: float) -> Attempt:
    """Return codes [groups, group, columns], scales and zero points [groups, columns] for a share of the range."""
    if table.zero_point:
        # The range must hold 0, so that a weight of 0 stays 0.
        low, high = np.minimum(groups.min(1), 0) * share, np.maximum(groups.max(1), 0) * share
        scales = _positive((high - low) / (len(table.values) - 1))
        zero_points = table.encode(-low / scales)
        return table.encode(groups / scales[:, None] + table.decode(zero_points)[:, None]), scales, zero_points
    scales = _positive(np.abs(groups).max(1) * share / table.limit)
    return table.encode(groups / scales[:, None]), scales, np.zeros(scales.shape, np.uint8)


def _positive(scales: Doubles) -> Doubles:
    # Rounded to what is stored, so that codes are chosen for the scale that will be used; a group of zeros gets 1.
    stored = scales.astype(np.float32).astype(np.float64)
    return np.where(stored > 0, stored, 1.0)


def _squared_error(groups: Doubles, table: TableFormat, attempt: Attempt) -> Doubles:
    codes, scales, zero_points = attempt
    shift = table.decode(zero_points)[:, None] if table.zero_point else 0.0
    return np.asarray((((table.decode(codes) - shift) * scales[:, None] - groups) ** 2).sum(1))
