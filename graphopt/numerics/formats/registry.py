"""All number formats by name, and a table of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphopt.errors import InputError
from graphopt.numerics.formats.format import Format
from graphopt.numerics.formats.table import TableFormat
from graphopt.util.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

FORMATS: Registry[Format] = Registry(
    "graphopt.numerics.formats",
    kind="number format",
    name_of=lambda member: member.name if isinstance(member, Format) else None,
)
"""Every format by name: ``int`` is symmetric, ``uint`` carries a zero point per group; a recipe may bring its own."""


def format_of(name: str | Sequence[float]) -> Format:
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


def format_stored_as(dtype: ir.DataType) -> Format | None:
    """Return the format whose codes ONNX stores as integers of this type, if there is one."""
    matches = (format for format in FORMATS.values() if format.onnx_type == dtype)
    return next(matches, None) if dtype.is_integer() else None
