"""Round to nearest, in groups along the axis that a product sums over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from graphopt.formats.table import Codes, TableFormat
from graphopt.weights import blocks_of

Doubles = npt.NDArray[np.float64]

Scale = Literal["extreme", "least_squares"]
"""How the scale of a group is chosen, see :func:`round_to_nearest`."""

# Shares of the extreme that the search for the least squared error tries.
LEAST_SHARE = 0.6
_SHARES = np.linspace(1.0, LEAST_SHARE, 17)


@dataclass(frozen=True)
class Quantized:
    """Codes of a matrix [rows, columns], and per group of rows a scale and perhaps a zero point.

    Attributes:
        format: what the codes mean.
        group: rows that share a scale; the last group may have fewer.
        codes: uint8 [rows, columns].
        scales: float32, or the type that was asked for, [groups, columns].
        zero_points: uint8 [groups, columns], the code that means 0, or ``None``.
    """

    format: TableFormat
    group: int
    codes: Codes
    scales: npt.NDArray[np.floating[Any]]
    zero_points: Codes | None

    def dequantize(self) -> Doubles:
        """Return the matrix that the codes stand for: (value(code) - value(zero point)) scale, [rows, columns]."""
        of_row = np.arange(len(self.codes)) // self.group
        values = self.format.decode(self.codes)
        if self.zero_points is not None:
            values -= self.format.decode(self.zero_points)[of_row]
        values *= self.scales.astype(np.float64)[of_row]
        return values


def round_to_nearest(
    matrix: npt.NDArray[Any],
    table: TableFormat,
    group: int | None,
    scale: Scale,
    *,
    scale_type: npt.DTypeLike = np.float32,
) -> Quantized:
    """Choose the code nearest to each weight.

    Without a zero point a group's scale maps its largest magnitude to the format's limit; with one, its range is mapped
    to the whole table. ``least_squares`` tries smaller ranges and keeps the one with the least squared error, group by
    group (QuaRot, Ashkboos et al. 2024, section 5, finds its clipping ratios by such a linear search).

    Args:
        matrix: [rows, columns], rows are what a product sums over.
        table: the format.
        group: rows that share a scale; ``None`` for all of them. The last group may have fewer.
        scale: how the scale is chosen. With equal steps and no zero point, ``extreme`` errs by at most half a step
            everywhere, with other tables by half the gap that the weight lies in; a zero point is itself rounded, which
            costs up to half a step more.
        scale_type: the floating type that scales are stored in. Codes are chosen for the stored scale; where it was
            rounded down, the largest weights lie beyond the limit by that share of it.

    Raises:
        ValueError: ``group`` is negative.
    """
    rows, columns = matrix.shape
    group = rows if group is None else group
    if group < 1:
        raise ValueError(f"{rows} rows cannot be cut into groups of {group}")
    full = rows // group
    parts = [
        (slice(0, full), slice(0, full * group), group),
        (slice(full, None), slice(full * group, None), rows % group),
    ]
    codes = np.empty((rows, columns), np.uint8)
    scales = np.empty((-(-rows // group), columns), scale_type)
    zero_points = np.empty(scales.shape, np.uint8)
    for _, block in blocks_of(matrix.shape, 0):
        for groups, these, size in parts:
            numbers = np.asarray(matrix[these, block], np.float64)
            if numbers.size:
                stack = numbers.reshape(-1, size, numbers.shape[1])
                chosen, scales[groups, block], zero_points[groups, block] = _choose(stack, table, scale, scales.dtype)
                codes[these, block] = chosen.reshape(numbers.shape)
    return Quantized(table, group, codes, scales, zero_points if table.zero_point else None)


Attempt = tuple[npt.NDArray[Any], ...]


def _choose(groups: Doubles, table: TableFormat, scale: Scale, scale_type: np.dtype[Any]) -> Attempt:
    """Return codes [groups, group, columns], scales and zero points [groups, columns] for ``groups``."""
    best = _attempt(groups, table, 1.0, scale_type)
    if scale == "extreme":
        return best
    error = _squared_error(groups, table, best)
    for share in _SHARES[1:]:
        trial = _attempt(groups, table, float(share), scale_type)
        trial_error = _squared_error(groups, table, trial)
        better = trial_error < error
        error = np.where(better, trial_error, error)
        best = tuple(
            np.where(better[:, None] if old.ndim == 3 else better, new, old)
            for old, new in zip(best, trial, strict=True)
        )
    return best


def _attempt(groups: Doubles, table: TableFormat, share: float, scale_type: np.dtype[Any]) -> Attempt:
    """Return codes [groups, group, columns], scales and zero points [groups, columns] for a share of the range."""
    if table.zero_point:
        # The range must hold 0, so that a weight of 0 stays 0.
        low, high = np.minimum(groups.min(1), 0) * share, np.maximum(groups.max(1), 0) * share
        scales = _stored((high - low) / (len(table.values) - 1), scale_type)
        zero_points = table.encode(-low / scales)
        return table.encode(groups / scales[:, None] + table.decode(zero_points)[:, None]), scales, zero_points
    scales = _stored(np.abs(groups).max(1) * share / table.limit, scale_type)
    return table.encode(groups / scales[:, None]), scales, np.zeros(scales.shape, np.uint8)


def _stored(scales: Doubles, scale_type: np.dtype[Any]) -> Doubles:
    """Return the scales that will be used: within the range of their type and rounded to it; 1 for a group of zeros."""
    limits = ml_dtypes.finfo(scale_type)  # type: ignore[no-untyped-call]
    within = np.clip(scales, float(limits.smallest_subnormal), float(limits.max))
    return np.where(scales > 0, within.astype(scale_type).astype(np.float64), 1.0)


def _squared_error(groups: Doubles, table: TableFormat, attempt: Attempt) -> Doubles:
    codes, scales, zero_points = attempt
    shift = table.decode(zero_points)[:, None] if table.zero_point else 0.0
    return np.asarray((((table.decode(codes) - shift) * scales[:, None] - groups) ** 2).sum(1))
