"""The schema of ``ai.graphopt::Hadamard``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime_ops.schema import Coordinates, Cost, Port, Role, Schema

if TYPE_CHECKING:
    from collections.abc import Sequence


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what the body takes for inputs of these shapes, with an x of float."""
    x, left, right = shapes
    elements = prod(x)
    return Cost(operations=2 * elements * (left[0] + right[0]), bytes=8 * elements + prod(left) + prod(right))


SCHEMA = Schema(
    name="Hadamard",
    version=1,
    inputs=(
        Port("x", Role.DATA, (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)),
        Port("left", Role.MATRIX, (ir.DataType.INT8,)),
        Port("right", Role.MATRIX, (ir.DataType.INT8,)),
    ),
    outputs=(Port("y", Role.DATA, same_type_as="x"),),
    attributes={},
    shapes=lambda shapes, _: (shapes["x"],),
    cost=cost,
    coordinates=Coordinates.ROTATES,
)
