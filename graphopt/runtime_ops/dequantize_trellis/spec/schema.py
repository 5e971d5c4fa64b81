"""The schema of ``ai.graphopt::DequantizeTrellis``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime_ops.schema import Coordinates, Cost, Port, Role, Schema

if TYPE_CHECKING:
    from collections.abc import Sequence

TABLES = Port("tables", Role.TABLE, (ir.DataType.FLOAT,))


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what a call takes, with float scales: two lookups, a sum and a product for each number."""
    codes, scales, tables = shapes
    return Cost(operations=4 * prod(codes), bytes=5 * prod(codes) + 4 * (prod(scales) + prod(tables)))


SCHEMA = Schema(
    name="DequantizeTrellis",
    version=1,
    inputs=(
        Port("codes", Role.CODES, (ir.DataType.UINT8,), columns=1),
        Port("scales", Role.SCALES, (ir.DataType.FLOAT, ir.DataType.FLOAT16), columns=1),
        TABLES,
    ),
    outputs=(Port("W", Role.DATA, (ir.DataType.FLOAT,)),),
    attributes=dict.fromkeys(("bits", "group"), ir.AttributeType.INT),
    shapes=lambda shapes, _: (shapes["codes"],),
    cost=cost,
    coordinates=Coordinates.DECODES,
)
