"""The schema of ``ai.graphopt::MatMulCodebook``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime_ops.dequantize_codebook.spec.packing import LANES
from graphopt.runtime_ops.dequantize_codebook.spec.schema import ATTRIBUTES, OPERANDS
from graphopt.runtime_ops.schema import Coordinates, Cost, Port, Role, Schema

if TYPE_CHECKING:
    from collections.abc import Sequence


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what a call takes, with float scales and the padding of the last tile."""
    x, codes, scales, levels, *tables = shapes
    outputs = prod(x[:-1]) * LANES * codes[0]
    numbers = prod(x) + outputs + prod(scales) + sum(map(prod, tables))
    return Cost(operations=2 * outputs * x[-1], bytes=prod(codes) + prod(levels) + 4 * numbers)


SCHEMA = Schema(
    name="MatMulCodebook",
    version=1,
    inputs=(
        Port("x", Role.DATA, (ir.DataType.FLOAT, ir.DataType.FLOAT16)),
        Port("codes", Role.CODES, (ir.DataType.UINT8,), columns=0, bits=lambda shape, _: shape[-1] // 2),
        *OPERANDS,
    ),
    outputs=(Port("y", Role.DATA, same_type_as="x"),),
    attributes=ATTRIBUTES,
    shapes=lambda shapes, attributes: ((*shapes["x"][:-1], attributes["columns"]),),
    cost=cost,
    coordinates=Coordinates.MULTIPLIES,
)
