"""Number formats: what a code means. A new format is one line in :data:`FORMATS`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.errors import InputError
from graphopt.numerics.formats.floating import floating_point
from graphopt.numerics.formats.integer import signed_integer, ternary, unsigned_integer
from graphopt.numerics.formats.nonlinear import nonlinear
from graphopt.numerics.formats.quantile import normal_float4, student_float4
from graphopt.numerics.formats.steps import integer_step
from graphopt.numerics.formats.table import TableFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMATS: dict[str, TableFormat] = {
    table.name: table
    for table in (
        signed_integer(2, ir.DataType.INT2),
        signed_integer(3),
        signed_integer(4, ir.DataType.INT4),
        signed_integer(5),
        signed_integer(6),
        signed_integer(7),
        signed_integer(8, ir.DataType.INT8),
        unsigned_integer(2, ir.DataType.UINT2),
        unsigned_integer(3),
        unsigned_integer(4, ir.DataType.UINT4),
        unsigned_integer(5),
        unsigned_integer(6),
        unsigned_integer(7),
        unsigned_integer(8, ir.DataType.UINT8),
        ternary(),
        floating_point(2, 1, ir.DataType.FLOAT4E2M1),
        floating_point(2, 2),
        floating_point(3, 1),
        floating_point(2, 3),  # ONNX has types for these two from opset 28 on, which no runtime loads
        floating_point(3, 2),
        floating_point(4, 3, ir.DataType.FLOAT8E4M3FN, reserved=1),
        floating_point(5, 2, ir.DataType.FLOAT8E5M2, reserved=4),
        normal_float4(),
        student_float4(),
        nonlinear(3),
        nonlinear(4),
        nonlinear(5),
    )
}
"""Every format by name: ``int`` is symmetric, ``uint`` carries a zero point per group; a recipe may bring its own."""


def format_of(name: str | Sequence[float]) -> TableFormat:
    """Return the format called ``name``, or the one whose codes 0, 1, 2, ... mean the given numbers.

    Numbers are rounded to float32, which is what a model file holds.

    Raises:
        InputError: there is none of that name, or the numbers are more than 256, fewer than 2 or not finite.
    """
    if isinstance(name, str):
        if name not in FORMATS:
            raise InputError(f"there is no number format {name!r}", remedy=f"known are {', '.join(FORMATS)}")
        return FORMATS[name]
    with np.errstate(over="ignore"):
        numbers = tuple(float(np.float32(number)) for number in name)
    if len(set(numbers)) < 2 or len(numbers) > 256 or not np.isfinite(numbers).all():
        raise InputError(
            f"a table of {len(numbers)} numbers cannot be a number format: {list(name)[:20]}",
            remedy="give 2 to 256 finite numbers, the value of each code, at least two of them different",
        )
    return TableFormat("custom", (len(numbers) - 1).bit_length(), numbers)


def format_stored_as(dtype: ir.DataType) -> TableFormat | None:
    """Return the format whose codes ONNX stores as integers of this type, if there is one."""
    named = (table for table in FORMATS.values() if table.onnx_type == dtype)
    return next(named, None) if dtype.is_integer() else None


__all__ = ["FORMATS", "TableFormat", "format_of", "format_stored_as", "integer_step"]
