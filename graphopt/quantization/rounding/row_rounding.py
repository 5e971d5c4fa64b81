"""One row after another, rounded to the nearest codes: the inner step of error feedback, so with little around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.quantization.rounding import native
from graphopt.quantization.rounding.scales import Doubles, encoded

if TYPE_CHECKING:
    from graphopt.numerics.formats.table import Codes, TableFormat


class Rows:
    """Rounds rows with a scale for each number, to the codes of :func:`graphopt.quantization.rounding.scales.encoded`.

    Args:
        table: the format.
    """

    def __init__(self, table: TableFormat) -> None:
        self._table, self._zeros = table, table.zero_point
        self._native = native.Row(table) if native.available() else None

    def __call__(self, numbers: Doubles, scales: Doubles, zero_points: Codes, codes: Codes) -> Doubles:
        """Write the codes nearest to some numbers, and return what they stand for.

        Args:
            numbers: float64 [columns].
            scales: float64 [columns].
            zero_points: uint8 [columns]; not read where the format has none.
            codes: uint8 [columns], to be written.
        """
        shifts = self._table.values.take(zero_points) if self._zeros else None
        if self._native is None:
            codes[:] = encoded(numbers, self._table, scales, zero_points)
        else:
            self._native(numbers, scales, shifts, codes)
        values = self._table.values.take(codes)
        if shifts is not None:
            values -= shifts
        values *= scales
        return values
