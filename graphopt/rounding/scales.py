"""Scales and zero points of groups: chosen by their extremes, or searched for the least squared error."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from graphopt.formats.table import Codes, TableFormat

Doubles = npt.NDArray[np.float64]

Scale = Literal["extreme", "least_squares"]
"""How the scale of a group is chosen, see :func:`graphopt.rounding.round_to_nearest`."""

LEAST_SHARE = 0.6
"""The smallest share of the extreme that the search for the least squared error tries."""

_SHARES = np.linspace(1.0, LEAST_SHARE, 17)


class Chosen(NamedTuple):
    """Codes of groups, and what is stored beside them.

    Attributes:
        codes: uint8 [groups, rows of a group, columns].
        scales: as stored, float64 [groups, columns].
        zero_points: uint8 [groups, columns]; zeros where the format has none.
    """

    codes: Codes
    scales: Doubles
    zero_points: Codes


def choose(
    groups: Doubles, table: TableFormat, scale: Scale, scale_type: np.dtype[Any], importance: Doubles | None = None
) -> Chosen:
    """Choose the scale of each group, and the codes nearest to its numbers.

    Args:
        groups: [groups, rows of a group, columns].
        table: the format.
        scale: how.
        scale_type: the floating type that scales are stored in; codes are chosen for the stored scale.
        importance: what a squared error counts, [groups, rows of a group, 1]; ``None`` for 1.
    """
    best = attempt(groups, table, 1.0, scale_type)
    if scale == "extreme":
        return best
    error = squared_error(groups, table, best, importance)
    for share in _SHARES[1:]:
        trial = attempt(groups, table, float(share), scale_type)
        best, error = better(best, error, trial, squared_error(groups, table, trial, importance))
    return best


def better(best: Chosen, error: Doubles, trial: Chosen, trial_error: Doubles) -> tuple[Chosen, Doubles]:
    """Return, group by group, the one of less error, and that error; of equal ones ``best``."""
    improved = trial_error < error
    return (
        Chosen(
            np.where(improved[:, None], trial.codes, best.codes),
            np.where(improved, trial.scales, best.scales),
            np.where(improved, trial.zero_points, best.zero_points),
        ),
        np.where(improved, trial_error, error),
    )


def attempt(groups: Doubles, table: TableFormat, share: float, scale_type: np.dtype[Any]) -> Chosen:
    """Return codes for scales that map a share of each group's range to the table."""
    if table.zero_point:
        # The range must hold 0, so that a weight of 0 stays 0.
        low, high = np.minimum(groups.min(1), 0) * share, np.maximum(groups.max(1), 0) * share
        scales = stored(high - low, len(table.values) - 1, scale_type)
        zero_points = table.encode(-low / scales)
    else:
        scales = stored(np.abs(groups).max(1) * share, table.limit, scale_type)
        zero_points = np.zeros(scales.shape, np.uint8)
    return Chosen(encoded(groups, table, scales[:, None], zero_points[:, None]), scales, zero_points)


def encoded(numbers: Doubles, table: TableFormat, scales: Doubles, zero_points: Codes) -> Codes:
    """Return the codes nearest to ``numbers``; scales and zero points are broadcast to their shape."""
    if table.zero_point:
        return table.encode(numbers / scales + table.decode(zero_points))
    return table.encode(numbers / scales)


def decoded(codes: Codes, table: TableFormat, scales: Doubles, zero_points: Codes) -> Doubles:
    """Return what codes stand for; scales and zero points are broadcast to their shape."""
    shift = table.decode(zero_points) if table.zero_point else 0.0
    return np.asarray((table.decode(codes) - shift) * scales)


def squared_error(groups: Doubles, table: TableFormat, chosen: Chosen, importance: Doubles | None = None) -> Doubles:
    """Return the squared error of each group, weighted by ``importance``: [groups, columns]."""
    values = decoded(chosen.codes, table, chosen.scales[:, None], chosen.zero_points[:, None])
    squares = (values - groups) ** 2
    return np.asarray((squares if importance is None else importance * squares).sum(1))


def stored(ranges: Doubles, limit: float, scale_type: np.dtype[Any]) -> Doubles:
    """Return ``ranges / limit`` as they will be stored: within the range of their type and rounded to it; 1 for 0."""
    scales = ranges / limit
    limits = ml_dtypes.finfo(scale_type)  # type: ignore[no-untyped-call]
    within = np.clip(scales, float(limits.smallest_subnormal), float(limits.max))
    return np.where(scales > 0, within.astype(scale_type).astype(np.float64), 1.0)
