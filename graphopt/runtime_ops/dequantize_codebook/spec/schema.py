"""The schema of ``ai.graphopt::DequantizeCodebook``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphopt.runtime_ops.dequantize_codebook.spec.packing import LANES
from graphopt.runtime_ops.schema import Coordinates, Cost, Port, Role, Schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_BYTES, _FLOAT = (ir.DataType.UINT8,), (ir.DataType.FLOAT,)

OPERANDS = (
    Port("scales", Role.SCALES, (ir.DataType.FLOAT, ir.DataType.FLOAT16), columns=0),
    Port("levels", Role.SCALES, _BYTES, placeholder=1, columns=0),
    Port("level_table", Role.ZERO_POINTS, _FLOAT),
    Port("books", Role.TABLE, _FLOAT),
    Port("shifts", Role.ZERO_POINTS, _FLOAT),
)
"""What makes numbers of codes."""

ATTRIBUTES = dict.fromkeys(
    ("rows", "columns", "axis", "index_bits", "second_bits", "sign_bits", "level_bits", "group", "span"),
    ir.AttributeType.INT,
)


def overload(**attributes: Any) -> str:
    """Return the name of the body for a node's attributes: how entries lie, and how the bits of a code are cut.

    Raises:
        ValueError: they are none that the definition knows.
    """
    fields = [attributes[name] for name in ("axis", "index_bits", "second_bits", "sign_bits", "level_bits")]
    axis, index, second, signs, levels = fields
    if (
        axis not in (0, 1)
        or not 1 <= index <= 16
        or not 0 <= second <= 16
        or not 0 <= signs <= 16
        or levels not in range(9)
    ):
        raise ValueError(f"axis, index_bits, second_bits, sign_bits and level_bits cannot be {fields}")
    return "_".join(map(str, fields))


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what a call takes: two lookups, a sign, a shift and a scale for each number."""
    codes, scales, levels, *tables = shapes
    numbers = codes[0] * codes[1] * LANES * tables[1][1]
    read_bytes = prod(codes) + prod(levels) + 4 * (prod(scales) + sum(map(prod, tables)))
    return Cost(operations=5 * numbers, bytes=read_bytes + 4 * numbers)


def matrix_shape(_: Mapping[str, Any], attributes: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
    """Return the shape of W."""
    return ((attributes["rows"], attributes["columns"]),)


SCHEMA = Schema(
    name="DequantizeCodebook",
    version=1,
    inputs=(Port("codes", Role.CODES, _BYTES, columns=0), *OPERANDS),
    outputs=(Port("W", Role.DATA, _FLOAT),),
    attributes=ATTRIBUTES,
    shapes=matrix_shape,
    cost=cost,
    coordinates=Coordinates.DECODES,
)
