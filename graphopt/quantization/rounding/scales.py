"""Scales and zero points of groups: chosen by their extremes, or searched for the least squared error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from graphopt.quantization.rounding import native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.numerics.formats.format import Codes, Format

Doubles = npt.NDArray[np.float64]

Scale = Literal["extreme", "least_squares"]
"""How the scale of a group is chosen, see :func:`graphopt.quantization.rounding.round_to_nearest`."""

LEAST_SHARE = 0.6
"""The smallest share of the extreme that the search for the least squared error tries."""

_SHARES = np.linspace(1.0, LEAST_SHARE, 17)


_PIECE = 1 << 17
"""Numbers that are searched together, so that they stay in a cache while one scale after another is tried."""


class Scaling(NamedTuple):
    """What is stored beside the codes of groups.

    Attributes:
        scales: as stored, float64 [groups, columns].
        zero_points: uint8 [groups, columns]; zeros where the format has none.
    """

    scales: Doubles
    zero_points: Codes


class GroupCodes(NamedTuple):
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
    groups: Doubles, format: Format, scale: Scale, scale_type: np.dtype[Any], importance: Doubles | None = None
) -> GroupCodes:
    """Choose the scale of each group, and the codes nearest to its numbers, each by itself.

    Args:
        groups: [groups, rows of a group, columns].
        format: the format.
        scale: how.
        scale_type: the floating type that scales are stored in; codes are chosen for the stored scale.
        importance: what a squared error counts, [groups, rows of a group, 1]; ``None`` for 1.
    """
    shares = [1.0] if scale == "extreme" else [float(share) for share in _SHARES]
    if native.rounds(format):
        return _search_natively(groups, format, shares, scale_type, importance)
    at_once = max(1, _PIECE // max(1, groups.shape[1] * groups.shape[2]))
    pieces = [slice(begin, begin + at_once) for begin in range(0, len(groups), at_once)]
    parts = [
        _search_shares(groups[p], format, shares, scale_type, None if importance is None else importance[p])
        for p in pieces
    ]
    return GroupCodes(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _search_natively(
    groups: Doubles, format: Format, shares: Sequence[float], scale_type: np.dtype[Any], importance: Doubles | None
) -> GroupCodes:
    """Do what :func:`_search_shares` does, with all shares in one call of the library."""
    extremes = extremes_of(groups, format)
    trials = scaling_at(extremes, format, np.array(shares)[:, None, None], scale_type)
    zero_points = trials.zero_points if format.zero_point else None
    best_trials, codes = native.search_groups(groups, format, trials.scales, zero_points, importance)
    best = Scaling(*(np.take_along_axis(trial, best_trials[None].astype(np.intp), 0)[0] for trial in trials))
    return GroupCodes(codes, *best)


def _search_shares(
    groups: Doubles, format: Format, shares: Sequence[float], scale_type: np.dtype[Any], importance: Doubles | None
) -> GroupCodes:
    extremes = extremes_of(groups, format)
    best = scaling_at(extremes, format, shares[0], scale_type)
    if len(shares) > 1:
        error = squared_error(groups, format, best, importance)
        for share in shares[1:]:
            trial = scaling_at(extremes, format, share, scale_type)
            best, error = better(best, error, trial, squared_error(groups, format, trial, importance))
    return GroupCodes(nearest(groups, format, best, importance), *best)


def better(best: Scaling, error: Doubles, trial: Scaling, trial_error: Doubles) -> tuple[Scaling, Doubles]:
    """Return, group by group, the one of less error, and that error; of equal ones ``best``."""
    is_better = trial_error < error
    return (
        Scaling(
            np.where(is_better, trial.scales, best.scales), np.where(is_better, trial.zero_points, best.zero_points)
        ),
        np.where(is_better, trial_error, error),
    )


def extremes_of(groups: Doubles, format: Format) -> tuple[Doubles, Doubles]:
    """Return what scales must cover of each group, [groups, columns]: its range with 0, or its largest magnitude."""
    if format.zero_point:
        # The range must hold 0, so that a weight of 0 stays 0.
        return np.minimum(groups.min(1), 0), np.maximum(groups.max(1), 0)
    top = np.abs(groups).max(1)
    return -top, top


def scaling_at(
    extremes: tuple[Doubles, Doubles], format: Format, share: float | Doubles, scale_type: np.dtype[Any]
) -> Scaling:
    """Return scales that map a share of each group's extremes to the format, with their zero points.

    For several shares [n, 1, 1] they are [n, groups, columns].
    """
    low, high = (extreme * share for extreme in extremes)
    scales = stored_scales(high - low if format.zero_point else high, format.limit, scale_type)
    if format.joint_columns != 1:  # such a format need not have a 0: a group of zeros gets the least normal scale
        smallest_scale = float(ml_dtypes.finfo(scale_type).smallest_normal)  # type: ignore[no-untyped-call]
        scales = np.where(high == 0, smallest_scale, scales)
    return Scaling(scales, format.zero_points(-low, scales))


def nearest(groups: Doubles, format: Format, scaling: Scaling, importance: Doubles | None = None) -> Codes:
    """Return the codes nearest to the numbers of groups, uint8 [groups, rows of a group, codes of a row]."""
    scales, zero_points = scaling.scales, scaling.zero_points if format.zero_point else None
    if native.rounds(format):
        _, codes = native.round_groups(groups, format, scales, zero_points, codes=True)
        assert codes is not None
        return codes
    return native.encode(groups, format, scales, zero_points, importance)


def squared_error(groups: Doubles, format: Format, scaling: Scaling, importance: Doubles | None = None) -> Doubles:
    """Return what the nearest codes cost: the squared error of each group, weighted by ``importance``."""
    scales, zero_points = scaling.scales, scaling.zero_points if format.zero_point else None
    if native.rounds(format):
        errors, _ = native.round_groups(groups, format, scales, zero_points, importance, errors=True)
        assert errors is not None
        return errors
    factors, points = scales[:, None], None if zero_points is None else zero_points[:, None]
    values = format.decode(format.encode(groups, factors, points, importance), factors, points)
    squares = (values - groups) ** 2
    weighted_squares = squares if importance is None else importance * squares
    total = np.zeros(scales.shape)
    for row in range(groups.shape[1]):  # in this order for any number of columns, as native.py sums too
        total += weighted_squares[:, row]
    return total


def stored_scales(ranges: Doubles, limit: float, scale_type: np.dtype[Any]) -> Doubles:
    """Return ``ranges / limit`` as they will be stored: within the range of their type and rounded to it; 1 for 0."""
    scales = ranges / limit
    limits = ml_dtypes.finfo(scale_type)  # type: ignore[no-untyped-call]
    bounded_scales = np.clip(scales, float(limits.smallest_subnormal), float(limits.max))
    return np.where(scales > 0, bounded_scales.astype(scale_type).astype(np.float64), 1.0)
