"""The schema of ``ai.graphopt::Dequantize``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime_ops.matmul_table.spec.schema import OPTIONAL
from graphopt.runtime_ops.schema import Coordinates, Cost, Port, Role, Schema

if TYPE_CHECKING:
    from collections.abc import Sequence

_SCALES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what a call takes, with float scales: a lookup, a difference and a product for each number."""
    codes, *parameters = shapes
    return Cost(operations=3 * prod(codes), bytes=5 * prod(codes) + 4 * sum(prod(shape) for shape in parameters))


SCHEMA = Schema(
    name="Dequantize",
    version=1,
    inputs=(
        Port("codes", Role.CODES, (ir.DataType.UINT8,), columns=1),
        Port("scales", Role.SCALES, _SCALES, columns=1),
        Port("table", Role.TABLE, (ir.DataType.FLOAT,)),
        Port("zero_points", Role.ZERO_POINTS, _SCALES, same_type_as="scales", placeholder=1, columns=1),
    ),
    outputs=(Port("W", Role.DATA, (ir.DataType.FLOAT,)),),
    attributes={"group": ir.AttributeType.INT},
    optional=OPTIONAL,
    shapes=lambda shapes, _: (shapes["codes"],),
    cost=cost,
    coordinates=Coordinates.DECODES,
)
