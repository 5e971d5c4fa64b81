"""A format of up to 8 bits is a table: code -> value. A weight is value x scale, with one scale per group."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.numerics.formats.format import Codes, Doubles, Format, Levels, Singles, Values

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx_ir as ir

# Cells of a table of nearest values, and how many the smallest gap between two values must have.
_CELLS, _CELLS_OF_GAP = 8192, 8


@dataclass(frozen=True)
class TableFormat(Format):
    """A format whose codes each mean a number of a table, whatever their neighbours are.

    Several codes may mean the same number: -0 and 0 do, and what is NaN or infinite in the standard of a format means
    the largest number here. :meth:`encode` writes the lowest of such codes, so neither -0 nor those.

    Attributes:
        table: the value of each code, at most ``2**bits`` numbers that float32 holds; code c of two's complement int4
            stands at index c mod 16.
        onnx_type: the standard ONNX type that holds the codes, ``None`` where there is none that a runtime loads.
        zero_point: whether groups carry a zero point, a code that means 0; the table is then 0, 1, 2, ...

    Raises:
        ValueError: the table does not fit its description.
    """

    table: tuple[float, ...]
    onnx_type: ir.DataType | None = None
    zero_point: bool = False

    def __post_init__(self) -> None:
        if self.bits not in range(1, 9) or not 1 <= len(self.table) <= 2**self.bits:
            raise ValueError(f"{self.name} has {len(self.table)} values in {self.bits} bits; 1 to 8 bits hold 2^bits")
        with np.errstate(over="ignore"):
            singles = np.array(self.table, np.float32)
        if not np.array_equal(singles, np.array(self.table)) or not np.isfinite(singles).all() or not singles.any():
            raise ValueError(f"the values of {self.name} must be finite, of float32, and not all zero: {self.table}")
        if self.zero_point and self.table != tuple(range(2**self.bits)):
            raise ValueError(f"{self.name} carries zero points, so its values must be 0 .. {2**self.bits - 1}")

    @cached_property
    def values(self) -> Doubles:
        """The table as an array, [entries]."""
        return np.array(self.table)

    @cached_property
    def limit(self) -> float:
        """See :class:`Format`.

        With equal steps (integers, ternary) it is half a step beyond the end of the table, so that nothing within errs
        by more than half a step. With others (floating point, nf4, sf4) it is the end itself, as their papers have it.
        Of the two ends the nearer to zero counts; a table without numbers on one side of zero has one end.
        """
        if self.zero_point:
            return float(len(self.table) - 1)
        values = self.levels.values
        steps = np.diff(values)
        margin = float(steps[0]) / 2 if len(steps) and (steps == steps[0]).all() else 0.0
        return min(float(end) + margin for end in (values[-1], -values[0]) if end > 0)

    @cached_property
    def levels(self) -> Levels:
        """The different values in order, and the lowest code of each."""
        values, codes = np.unique(self.values, return_index=True)
        return Levels(values, codes.astype(np.uint8))

    @cached_property
    def operands(self) -> dict[str, Singles]:
        """The table as ``Dequantize`` reads it."""
        return {"table": self.values.astype(np.float32)}

    def encode(
        self,
        numbers: Values,
        scales: npt.ArrayLike = 1.0,
        zero_points: Codes | None = None,
        importance: npt.NDArray[Any] | None = None,  # noqa: ARG002 -- the nearest value is the best whatever it counts
    ) -> Codes:
        """Return the code of the value nearest to each weight; of ties see :meth:`Levels.encode`."""
        units = numbers / np.asarray(scales)
        return self.levels.encode(units if zero_points is None else units + self.values.take(zero_points))

    def decode(self, codes: Codes, scales: npt.ArrayLike | None = None, zero_points: Codes | None = None) -> Doubles:
        """See :class:`Format`."""
        values = self.values.take(codes)
        if zero_points is not None:
            values -= self.values.take(zero_points)
        if scales is not None:
            values *= np.asarray(scales)
        return values

    def approximate(self, units: Singles, scales: Singles) -> Singles:  # noqa: ARG002 -- units say all
        """Return the nearest values, perhaps the other neighbour near a tie."""
        return _approximation(self)(units)

    def to_onnx(self, codes: Codes) -> npt.NDArray[Any]:
        """See :class:`Format`."""
        if self.onnx_type is None:
            return super().to_onnx(codes)
        return np.asarray(self.values.astype(self.onnx_type.numpy())[codes])


@functools.lru_cache(maxsize=64)
def _approximation(table: TableFormat) -> Callable[[Singles], Singles]:
    """Return a function that rounds numbers to the values of a table, by a table of cells where that is fast."""
    levels = table.levels.values
    low, high, gap = float(levels[0]), float(levels[-1]), float(np.diff(levels).min(initial=np.inf))
    if (np.diff(levels) == 1).all() and low.is_integer():
        return lambda numbers: np.clip(np.rint(numbers, out=numbers), low, high, out=numbers)
    cell = (high - low) / (_CELLS - 1)
    if gap < _CELLS_OF_GAP * cell:
        return lambda numbers: table.decode(table.levels.encode(numbers)).astype(np.float32)
    values = table.decode(table.encode(np.linspace(low, high, _CELLS))).astype(np.float32)

    def look_up(numbers: Singles) -> Singles:
        numbers -= np.float32(low)
        numbers *= np.float32(1 / cell)
        numbers += np.float32(0.5)
        cells = np.clip(numbers, 0, _CELLS - 1, out=numbers).astype(np.intp)
        # A mode other than "raise" lets it write to `out` without a copy.
        return np.take(values, cells, out=numbers, mode="wrap")

    return look_up
