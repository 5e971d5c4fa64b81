"""The schema of ``ai.graphopt::UnpackTrellis``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime_ops.dequantize_trellis.spec.schema import TABLES
from graphopt.runtime_ops.matmul_table.spec.packing import TILE, UNIT
from graphopt.runtime_ops.matmul_table.spec.schema import PORTS, SIZES
from graphopt.runtime_ops.schema import Coordinates, Cost, Port, Role, Schema

if TYPE_CHECKING:
    from collections.abc import Sequence


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what a call takes, with float scales and the padding of the last tile and unit."""
    codes, scales, tables = shapes
    numbers = TILE * UNIT * prod(codes[:2])
    return Cost(operations=4 * numbers, bytes=prod(codes) + 4 * (numbers + prod(scales) + prod(tables)))


SCHEMA = Schema(
    name="UnpackTrellis",
    version=1,
    inputs=(*(port for port in PORTS if port.name in ("codes", "scales")), TABLES),
    outputs=(Port("W", Role.DATA, (ir.DataType.FLOAT,)),),
    attributes=SIZES,
    shapes=lambda _, attributes: ((attributes["rows"], attributes["columns"]),),
    cost=cost,
    coordinates=Coordinates.DECODES,
)
