"""The schema of ``ai.graphopt::MatMulDynamic``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime_ops.hadamard.spec import schema as hadamard
from graphopt.runtime_ops.matmul_table.spec import schema as matmul_table
from graphopt.runtime_ops.schema import Coordinates, Cost, Port, Role, Schema

if TYPE_CHECKING:
    from collections.abc import Sequence


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what a call takes, with float scales and the padding of the last tile."""
    *of_product, left, right = shapes
    product = matmul_table.cost(of_product)
    turning = hadamard.cost([shapes[0], left, right]).operations if left[0] * right[0] > 1 else 0
    return Cost(operations=product.operations + turning, bytes=product.bytes + prod(left) + prod(right))


SCHEMA = Schema(
    name="MatMulDynamic",
    version=1,
    inputs=(
        *matmul_table.PORTS,
        Port("left", Role.MATRIX, (ir.DataType.INT8,), placeholder=1),
        Port("right", Role.MATRIX, (ir.DataType.INT8,), placeholder=1),
    ),
    outputs=(Port("y", Role.DATA, same_type_as="x"),),
    attributes={**matmul_table.SIZES, "bits": ir.AttributeType.INT, "clip": ir.AttributeType.FLOAT},
    optional=matmul_table.PACKED_OPTIONAL,
    shapes=matmul_table.SCHEMA.shapes,
    cost=cost,
    coordinates=Coordinates.MULTIPLIES,
    precision=lambda attributes: f"int{attributes.get('bits', 8)} per token",
)
