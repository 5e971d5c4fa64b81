"""The schema of ``ai.graphopt::GatherTable``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime_ops.matmul_table.spec.packing import UNIT, bits_of
from graphopt.runtime_ops.matmul_table.spec.schema import PACKED_OPTIONAL, PORTS, SIZES
from graphopt.runtime_ops.schema import Coordinates, Cost, Port, Role, Schema

if TYPE_CHECKING:
    from collections.abc import Sequence

_WEIGHT_PORTS = ("codes", "scales", "table", "zero_points")


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what a call takes: only the columns that are asked for are read."""
    ids, codes, scales, table, _ = shapes
    rows = UNIT * codes[1]
    of_groups = 8 * scales[1] if len(scales) == len(codes) else scales[1] // 8  # floats, or bytes of 16 columns
    bytes_of_column = rows * bits_of(codes) // 8 + of_groups
    return Cost(operations=3 * prod(ids) * rows, bytes=prod(ids) * (8 + bytes_of_column + 4 * rows) + 4 * prod(table))


SCHEMA = Schema(
    name="GatherTable",
    version=1,
    inputs=(
        Port("ids", Role.INDICES, (ir.DataType.INT64,)),
        *(port for port in PORTS if port.name in _WEIGHT_PORTS),
    ),
    outputs=(Port("y", Role.DATA, (ir.DataType.FLOAT,)),),
    attributes=SIZES,
    optional=PACKED_OPTIONAL,
    shapes=lambda shapes, attributes: ((*shapes["ids"], attributes["rows"]),),
    cost=cost,
    coordinates=Coordinates.DECODES,
)
