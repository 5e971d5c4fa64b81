"""The schema of ``ai.graphopt::MatMulExperts``."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphopt.runtime_ops.matmul_table.spec.packing import TILE
from graphopt.runtime_ops.matmul_table.spec.schema import PACKED_OPTIONAL, PORTS, SIZES, precision, scale_bytes
from graphopt.runtime_ops.schema import Coordinates, Cost, Port, Role, Schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what a call takes where no two slots share an expert, up to all experts; scales as in MatMulTable."""
    x, codes, scales, table, zero_points, bias, experts = shapes
    slots, count = prod(experts), max(1, codes[0])
    outputs = slots * TILE * codes[1]
    of_stacks = scale_bytes(scales, codes) * (prod(scales) + (prod(zero_points) if len(bias) > 1 else 0))
    of_stacks += 4 * prod(bias) if len(bias) > 1 else 0
    read_experts = min(slots, count)
    numbers = prod(x) + outputs + prod(table) + 2 * slots
    return Cost(operations=2 * outputs * x[-1], bytes=(prod(codes) + of_stacks) * read_experts // count + 4 * numbers)


def shapes(shapes_by_name: Mapping[str, Sequence[Any]], attributes: Mapping[str, Any]) -> tuple[tuple[Any, ...]]:
    """Return the shape of y: a row for each slot."""
    return ((*shapes_by_name["experts"], attributes["columns"]),)


SCHEMA = Schema(
    name="MatMulExperts",
    version=1,
    inputs=(
        *(port if port.columns is None else replace(port, columns=port.columns + 1) for port in PORTS),
        Port("experts", Role.INDICES, (ir.DataType.INT64,)),
    ),
    outputs=(Port("y", Role.DATA, same_type_as="x"),),
    attributes={**SIZES, "activations": ir.AttributeType.STRING},
    optional=PACKED_OPTIONAL,
    shapes=shapes,
    cost=cost,
    coordinates=Coordinates.MULTIPLIES,
    precision=precision,
)
