"""One row after another, rounded to the nearest codes: the inner step of error feedback, so with little around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.quantization.rounding import native

if TYPE_CHECKING:
    from graphopt.numerics.formats.format import Codes, Doubles, Format


class Rows:
    """Rounds rows with a scale for each number, to the codes that the format has for them.

    Args:
        format: the format.
    """

    def __init__(self, format: Format) -> None:
        self._format = format
        self._native = native.Row(format) if native.rounds(format) else None

    def __call__(self, numbers: Doubles, scales: Doubles, zero_points: Codes, codes: Codes) -> Doubles:
        """Write the codes nearest to some numbers, and return what they stand for.

        Args:
            numbers: float64 [columns].
            scales: float64 [columns].
            zero_points: uint8 [columns]; not read where the format has none.
            codes: uint8 [codes of a row], to be written.
        """
        points = zero_points if self._format.zero_point else None
        if self._native is None:
            groups = None if points is None else points[None]
            codes[:] = native.encode(numbers[None, None], self._format, scales[None], groups)[0, 0]
        else:
            self._native(numbers, scales, None if points is None else self._format.decode(points), codes)
        return self._format.decode(codes, scales, points)
