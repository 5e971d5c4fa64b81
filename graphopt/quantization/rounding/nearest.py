"""Round to nearest, in groups along the axis that a product sums over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.quantization.rounding.scale_search import Search
from graphopt.quantization.rounding.scales import Doubles, Scale, choose
from graphopt.util.processors import run_in_threads

if TYPE_CHECKING:
    from graphopt.numerics.formats.format import Codes, Format


# Numbers that are rounded together: in float64 they and a few temporaries stay near the processor's last cache.
_NUMBERS = 1 << 20


@dataclass(frozen=True)
class QuantizedMatrix:
    """Codes of a matrix [rows, columns], and per group of rows a scale and perhaps a zero point.

    Attributes:
        format: what the codes mean.
        group: rows that share a scale; the last group may have fewer.
        codes: uint8 [rows, codes of a row], see :meth:`graphopt.numerics.formats.Format.code_columns`.
        scales: float32, or the type that was asked for, [groups, columns].
        zero_points: uint8 [groups, columns], the code that means 0, or ``None``.
    """

    format: Format
    group: int
    codes: Codes
    scales: npt.NDArray[np.floating[Any]]
    zero_points: Codes | None

    def dequantize(self) -> Doubles:
        """Return the matrix that the codes stand for: (value(code) - value(zero point)) scale, [rows, columns]."""
        of_row = np.arange(len(self.codes)) // self.group
        points = None if self.zero_points is None else self.zero_points[of_row]
        return self.format.decode(self.codes, self.scales.astype(np.float64)[of_row], points)


def round_to_nearest(
    matrix: npt.NDArray[Any],
    format: Format,
    group: int | None,
    scale: Scale,
    *,
    scale_type: npt.DTypeLike = np.float32,
) -> QuantizedMatrix:
    """Choose the code nearest to each weight.

    Without a zero point a group's scale maps its largest magnitude to the format's limit; with one, its range is mapped
    to all of its values. ``least_squares`` tries smaller ranges and keeps the one with the least squared error, group
    by group (QuaRot, Ashkboos et al. 2024, section 5, finds its clipping ratios by such a linear search).

    Args:
        matrix: [rows, columns], rows are what a product sums over.
        format: the format.
        group: rows that share a scale; ``None`` for all of them. The last group may have fewer.
        scale: how the scale is chosen. With equal steps and no zero point, ``extreme`` errs by at most half a step
            everywhere, with other values by half the gap that the weight lies in; a zero point is itself rounded, which
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
    codes = np.empty((rows, format.code_columns(slice(0, columns)).stop), np.uint8)
    scales = np.empty((-(-rows // group), columns), scale_type)
    zero_points = np.empty(scales.shape, np.uint8)

    def round_block(block: slice) -> None:
        block_codes = format.code_columns(block)
        for groups, rows_of_part, size in parts:
            numbers = np.asarray(matrix[rows_of_part, block], np.float64)
            if numbers.size:
                stack = numbers.reshape(-1, size, numbers.shape[1])
                search = choose if format.joint_columns == 1 else Search().choose
                choice = search(stack, format, scale, scales.dtype, None)
                codes[rows_of_part, block_codes] = choice.codes.reshape(len(numbers), -1)
                scales[groups, block], zero_points[groups, block] = choice.scales, choice.zero_points

    run_in_threads(round_block, list(format.blocks(columns, max(1, _NUMBERS // max(1, rows)))))
    return QuantizedMatrix(format, group, codes, scales, zero_points if format.zero_point else None)
