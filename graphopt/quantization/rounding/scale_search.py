"""Searches of scales that look further than that of ``nearest``: more shares, and the best scale of given codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from graphopt.quantization.rounding import native
from graphopt.quantization.rounding.scales import (
    Doubles,
    GroupCodes,
    Scale,
    Scaling,
    extremes_of,
    nearest,
    scaling_at,
    stored_scales,
)

if TYPE_CHECKING:
    from graphopt.numerics.formats.format import Codes, Format

Singles = npt.NDArray[np.float32]

# Where scales of paths begin: shares of the extreme, softened by what 64 normal numbers have: their largest is about
# this many times the root of their mean square.
_PATH_SHARES, _PEAK, _SOFTNESS = (0.95, 0.85), 2.5, 0.3
# How many times as far as the best scale for its codes is away a scale goes in the first round, and in the last, as
# codes change with it. Those of many rows change little, so long columns go farther, in half of the rounds.
_STRIDES, _LONG_STRIDES, _LONG = (3.0, 1.5), (5.0, 3.0), 256


class Search(BaseModel):
    """Which scales are tried: shares of the extreme first, then, from the best, the best scale for its codes.

    Attributes:
        least: the smallest share of the extreme.
        steps: how many shares, from 1 down to it.
        fits: how often the scale is fitted to the codes that the last one gave; once more where codes look at
            their neighbours, half as often there in groups of more than 256 rows. There only two shares are tried, as
            scale and path follow one another.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    least: Annotated[float, Field(gt=0, lt=1)] = 0.4
    steps: Annotated[int, Field(ge=2, le=100)] = 13
    fits: Annotated[int, Field(ge=0, le=100)] = 3

    def choose(
        self, groups: Doubles, format: Format, scale: Scale, kind: np.dtype[Any], importance: Doubles | None
    ) -> GroupCodes:
        """Choose scales and nearest codes; arguments as for :func:`graphopt.quantization.rounding.scales.choose`."""
        scaling = self.scaling(groups, format, scale, kind, importance)
        return GroupCodes(nearest(groups, format, scaling, importance), *scaling)

    def scaling(
        self, groups: Doubles, format: Format, scale: Scale, kind: np.dtype[Any], importance: Doubles | None
    ) -> Scaling:
        """Choose scales and zero points; arguments as for :func:`graphopt.quantization.rounding.scales.choose`.

        Errors are compared in float32, of codes that may be the other neighbour near a tie. With the scale ``extreme``
        nothing is searched.
        """
        extremes = extremes_of(groups, format)
        first = scaling_at(extremes, format, 1.0, kind)
        size = float(np.abs(groups).max(initial=0.0))
        if scale == "extreme" or not size:
            return first
        # Relative to the largest number float32 has room for squares, however large or small weights are.
        numbers, weights = (groups / size).astype(np.float32), _relative(importance)
        if format.joint_columns != 1:
            return _follow_paths(numbers, size, format, first, kind, weights, self.fits + 1)
        best = _State(first.scales, first.zero_points, np.full(first.scales.shape, np.inf))
        for share in np.linspace(1.0, self.least, self.steps):
            trial = scaling_at(extremes, format, float(share), kind)
            best = best.or_better(_try_scales(numbers, size, format, *trial, weights)[0])
        for _ in range(self.fits):
            state, values = _try_scales(numbers, size, format, best.scales, best.zero_points, weights)
            quotients = _best_scales(numbers, values, weights)
            scales = np.where(
                quotients > 0, stored_scales(quotients.astype(np.float64) * size, 1.0, kind), state.scales
            )
            best = best.or_better(_try_scales(numbers, size, format, scales, best.zero_points, weights)[0])
        return Scaling(best.scales, best.zero_points)


def _best_scales(numbers: Singles, values: Singles, weights: Singles | None) -> Singles:
    """Return the scales [groups, columns] of least error for codes that mean ``values``; 0 where all of them are 0."""
    weighted_values = values if weights is None else weights * values
    return _quotients(_sum_rows(weighted_values * numbers), _sum_rows(weighted_values * values))


def _quotients(products: Singles, squares: Singles) -> Singles:
    quotients: Singles = np.divide(products, squares, out=np.zeros(products.shape, np.float32), where=squares > 0)
    return quotients


def _sum_rows(numbers: Singles) -> Singles:
    """Return the sums over axis 1, one row after the other, as the library adds them up.

    NumPy does so, too, but for a single column, whose rows lie side by side: these it adds up in pairs.
    """
    total: Singles = numbers.sum(1) if numbers.shape[2] > 1 else np.add.accumulate(numbers, 1)[:, -1]
    return total


def _follow_paths(
    numbers: Singles,
    size: float,
    format: Format,
    first: Scaling,
    kind: np.dtype[Any],
    weights: Singles | None,
    rounds: int,
) -> Scaling:
    """Return scales for codes that look at their neighbours: each takes the best scale for its codes, and codes follow.

    Neighbours share their codes' errors, so no scale can be judged alone: all of a group of columns change together,
    and what was best for them together is returned. A start between the largest number and the root of the mean square
    is nearer to what will be than either. Few codes change with a scale, so the best scale for the last codes is near
    the last scale, and steps go further than to it, the first ones the furthest.

    Args:
        numbers: groups relative to ``size``, [groups, rows of a group, columns].
        size: what they are relative to.
        format: the format.
        first: scales that map extremes to the format's limit, and zero points.
        kind: the type that scales are stored in.
        weights: what squared errors count, [groups, rows of a group, 1]; ``None`` for 1.
        rounds: how often codes and scales follow one another.
    """
    top, root = np.abs(numbers).max(1).astype(np.float64), np.sqrt(np.square(numbers, dtype=np.float64).mean(1))
    softer = np.divide(_PEAK * root, top, out=np.ones_like(top), where=top > 0) ** _SOFTNESS
    trials = [
        _try_paths(
            numbers,
            size,
            format,
            np.where(top > 0, stored_scales(first.scales * softer, 1 / share, kind), first.scales),
            first.zero_points,
            weights,
        )
        for share in _PATH_SHARES
    ]
    best, fits = trials[0]
    for trial, trial_fits in trials[1:]:
        fits = np.where(trial.errors < best.errors, trial_fits, fits)
        best = best.or_better(trial)
    state = best
    for stride in _strides(numbers.shape[1], rounds):
        goals = fits.astype(np.float64) * size
        steps = np.maximum(state.scales + stride * (goals - state.scales), state.scales / 4)
        scales = np.where((goals > 0) & (top > 0), stored_scales(steps, 1.0, kind), state.scales)
        state, fits = _try_paths(numbers, size, format, scales, first.zero_points, weights)
        best = best.or_better(state)
    return Scaling(best.scales, best.zero_points)


def _strides(rows: int, rounds: int) -> Doubles:
    """Return the stride of each round for groups of so many rows, [rounds or half of them]."""
    if rows > _LONG:
        return np.geomspace(*_LONG_STRIDES, max(1, rounds // 2))
    return np.geomspace(*_STRIDES, rounds)


def _try_paths(
    numbers: Singles, size: float, format: Format, scales: Doubles, zero_points: Codes, weights: Singles | None
) -> tuple[_State, Singles]:
    """Return what the scales lead to, and the best scales for the codes that they give, relative to ``size``."""
    if not native.tries_scales(format):
        state, values = _try_scales(numbers, size, format, scales, zero_points, weights)
        return state, _best_scales(numbers, values, weights)
    errors, products, squares = native.try_scales(numbers, format, (scales / size).astype(np.float32), weights)
    return _State(scales, zero_points, format.pool_errors(errors)), _quotients(products, squares)


class _State:
    """Scales [groups, columns], zero points and the errors that they give."""

    def __init__(self, scales: Doubles, zero_points: Codes, errors: npt.NDArray[Any]) -> None:
        self.scales, self.zero_points, self.errors = scales, zero_points, errors

    def or_better(self, candidate: _State) -> _State:
        better = candidate.errors < self.errors
        return _State(
            np.where(better, candidate.scales, self.scales),
            np.where(better, candidate.zero_points, self.zero_points),
            np.where(better, candidate.errors, self.errors),
        )


def _try_scales(
    numbers: Singles, size: float, format: Format, scales: Doubles, zero_points: Codes, weights: Singles | None
) -> tuple[_State, Singles]:
    """Return what the scales lead to, and the values of the nearest codes, less the zero point."""
    step = (scales / size).astype(np.float32)[:, None]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        values = numbers / step
    if format.zero_point:
        shift = format.decode(zero_points).astype(np.float32)[:, None]
        values += shift
        values = format.approximate(values, step)
        values -= shift
    else:
        values = format.approximate(values, step)
    errors = values * step
    errors -= numbers
    errors *= errors
    if weights is not None:
        errors *= weights
    return _State(scales, zero_points, format.pool_errors(_sum_rows(errors))), values


def _relative(importance: Doubles | None) -> Singles | None:
    """Return importance relative to the largest of its group, where float32 has room for all that count."""
    if importance is None:
        return None
    largest = importance.max(1, keepdims=True)
    relative: Singles = np.divide(importance, largest, out=np.ones_like(importance), where=largest > 0).astype(
        np.float32
    )
    return relative
