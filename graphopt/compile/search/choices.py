"""Formats to choose from, and the bytes that a matrix takes in each."""

from __future__ import annotations

import math

from pydantic import ValidationError

from graphopt.errors import InputError
from graphopt.numerics.formats import TableFormat, format_of
from graphopt.passes.common.formats import LinearFormat
from graphopt.runtime_ops.matmul_table.spec.packing import DIGIT_BYTES, TILE, UNIT

Choice = LinearFormat
"""A format and its group, as a recipe names them."""

CHOICES = (
    *(LinearFormat(format=name, group=None) for name in ("t2", "t3", "t4", "t5")),
    *(LinearFormat(format=name, group=64) for name in ("t3", "t4", "t5", "fp6-e2m3")),
)
"""What is chosen from by default: trellises of 2 to 5 bits with a scale for each column, as behind rotations, those of
3 to 5 bits in groups, as for an lm_head that is not rotated, and 6.3 bits, all of one kernel."""

_DIGIT_VALUES = 3
_SCALE, _STEP = 2, 2  # bytes: float16, and the bfloat16 of a column whose scales are bytes


def choice_of(text: str) -> Choice:
    """Read ``nl4:64``, a format and its group; without a group it is 64, ``nl4:column`` is a scale for each column.

    Raises:
        InputError: there is no such format or group.
    """
    name, _, group = text.partition(":")
    try:
        return LinearFormat.model_validate({"format": name, "group": None if group == "column" else int(group or 64)})
    except (ValidationError, ValueError) as error:
        raise InputError(f"{text!r} is no format with a group: {error}", remedy="write it as nl4:64") from error


def name_of(choice: Choice) -> str:
    """Return ``nl4:64``, which :func:`choice_of` reads."""
    return f"{choice.format}:{choice.group or 'column'}"


def stored_bytes(choice: Choice, rows: int, columns: int, *, has_level_scales: bool = False) -> int:
    """Return the bytes of a matrix [rows, columns]: packed codes, and scales and zero points in float16.

    Args:
        choice: its format and group.
        rows: numbers of a column.
        columns: how many.
        has_level_scales: whether the recipe has the step ``level_scales``: scales of codes of no ONNX type are bytes
            then.
    """
    format = format_of(choice.format)
    groups = -(-rows // (choice.group or rows))
    scales = _SCALE * groups
    if has_level_scales and format.onnx_type is None:
        scales = min(scales, groups + _STEP)
    # codes of three values are digits of base 3, as ``compact_scales`` stores them for CPUs
    is_ternary = isinstance(format, TableFormat) and len(format.values) == _DIGIT_VALUES
    bits = 8 * DIGIT_BYTES / (TILE * UNIT) if is_ternary else format.bits_per_weight
    codes = math.ceil(bits * rows * columns / 8)
    return codes + (scales + (_SCALE * groups if format.zero_point else 0)) * columns
