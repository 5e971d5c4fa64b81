"""The search of scales that looks further than that of ``nearest``: more shares, and the best scale of given codes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from graphopt.quantization.rounding.scales import (
    Chosen,
    Doubles,
    Scale,
    Scaling,
    extremes_of,
    nearest,
    scaling_at,
    stored,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphopt.numerics.formats.table import Codes, TableFormat

Singles = npt.NDArray[np.float32]

# Cells of a table of nearest values, and how many the smallest gap between two values must have.
_CELLS, _CELLS_OF_GAP = 8192, 8


class Search(BaseModel):
    """Which scales are tried: shares of the extreme first, then, from the best, the best scale for its codes.

    Attributes:
        least: the smallest share of the extreme.
        steps: how many shares, from 1 down to it.
        fits: how often the scale is fitted to the codes that the last one gave.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    least: Annotated[float, Field(gt=0, lt=1)] = 0.4
    steps: Annotated[int, Field(ge=2, le=100)] = 13
    fits: Annotated[int, Field(ge=0, le=100)] = 3

    def choose(
        self, groups: Doubles, table: TableFormat, scale: Scale, kind: np.dtype[Any], importance: Doubles | None
    ) -> Chosen:
        """Choose scales and nearest codes; arguments as for :func:`graphopt.quantization.rounding.scales.choose`."""
        found = self.scaling(groups, table, scale, kind, importance)
        return Chosen(nearest(groups, table, found), *found)

    def scaling(
        self, groups: Doubles, table: TableFormat, scale: Scale, kind: np.dtype[Any], importance: Doubles | None
    ) -> Scaling:
        """Choose scales and zero points; arguments as for :func:`graphopt.quantization.rounding.scales.choose`.

        Errors are compared in float32, of codes that may be the other neighbour near a tie. With the scale ``extreme``
        nothing is searched.
        """
        extremes = extremes_of(groups, table)
        first = scaling_at(extremes, table, 1.0, kind)
        size = float(np.abs(groups).max(initial=0.0))
        if scale == "extreme" or not size:
            return first
        # Relative to the largest number float32 has room for squares, however large or small weights are.
        numbers, weights = (groups / size).astype(np.float32), _relative(importance)
        best = _State(first.scales, first.zero_points, np.full(first.scales.shape, np.inf))
        for share in np.linspace(1.0, self.least, self.steps):
            trial = scaling_at(extremes, table, float(share), kind)
            best = best.or_better(_tried(numbers, size, table, *trial, weights)[0])
        for _ in range(self.fits):
            state, values = _tried(numbers, size, table, best.scales, best.zero_points, weights)
            weighted = values if weights is None else weights * values
            above, below = (weighted * numbers).sum(1), (weighted * values).sum(1)
            fitted = np.divide(above, below, out=np.zeros(above.shape, np.float32), where=below > 0)
            scales = np.where(fitted > 0, stored(fitted.astype(np.float64) * size, 1.0, kind), state.scales)
            best = best.or_better(_tried(numbers, size, table, scales, best.zero_points, weights)[0])
        return Scaling(best.scales, best.zero_points)


class _State:
    """Scales [groups, columns], zero points and the errors that they give."""

    def __init__(self, scales: Doubles, zero_points: Codes, errors: npt.NDArray[Any]) -> None:
        self.scales, self.zero_points, self.errors = scales, zero_points, errors

    def or_better(self, other: _State) -> _State:
        better = other.errors < self.errors
        return _State(
            np.where(better, other.scales, self.scales),
            np.where(better, other.zero_points, self.zero_points),
            np.where(better, other.errors, self.errors),
        )


def _tried(
    numbers: Singles, size: float, table: TableFormat, scales: Doubles, zero_points: Codes, weights: Singles | None
) -> tuple[_State, Singles]:
    """Return what the scales lead to, and the values of the nearest codes, less the zero point."""
    step = (scales / size).astype(np.float32)[:, None]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        values = numbers / step
    if table.zero_point:
        shift = table.decode(zero_points).astype(np.float32)[:, None]
        values += shift
        values = _nearest(table)(values)
        values -= shift
    else:
        values = _nearest(table)(values)
    errors = values * step
    errors -= numbers
    errors *= errors
    if weights is not None:
        errors *= weights
    return _State(scales, zero_points, errors.sum(1)), values


@functools.lru_cache(maxsize=64)
def _nearest(table: TableFormat) -> Callable[[Singles], Singles]:
    """Return a function that rounds numbers to the values of a table, perhaps to the other neighbour near a tie."""
    ordered = np.unique(table.values)
    low, high, gap = float(ordered[0]), float(ordered[-1]), float(np.diff(ordered).min(initial=np.inf))
    if (np.diff(ordered) == 1).all() and low.is_integer():
        return lambda numbers: np.clip(np.rint(numbers, out=numbers), low, high, out=numbers)
    cell = (high - low) / (_CELLS - 1)
    if gap < _CELLS_OF_GAP * cell:
        return lambda numbers: table.decode(table.encode(numbers)).astype(np.float32)
    values = table.decode(table.encode(np.linspace(low, high, _CELLS))).astype(np.float32)

    def look_up(numbers: Singles) -> Singles:
        numbers -= np.float32(low)
        numbers *= np.float32(1 / cell)
        numbers += np.float32(0.5)
        cells = np.clip(numbers, 0, _CELLS - 1, out=numbers).astype(np.intp)
        # A mode other than "raise" lets it write to `out` without a copy.
        return np.take(values, cells, out=numbers, mode="wrap")

    return look_up


def _relative(importance: Doubles | None) -> Singles | None:
    """Return importance relative to the largest of its group, where float32 has room for all that count."""
    if importance is None:
        return None
    largest = importance.max(1, keepdims=True)
    relative: Singles = np.divide(importance, largest, out=np.ones_like(importance), where=largest > 0).astype(
        np.float32
    )
    return relative
