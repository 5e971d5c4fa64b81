"""The schema of ``ai.graphopt::CausalConv``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime_ops.schema import Cost, Port, Role, Schema

if TYPE_CHECKING:
    from collections.abc import Sequence


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what a call takes: a multiplication and an addition for each tap of each number, in float32."""
    x, weight, bias, mask, state = shapes
    numbers = 2 * (prod(x) + prod(state)) + prod(weight) + prod(bias)
    return Cost(operations=2 * prod(x) * weight[1], bytes=4 * numbers + 8 * prod(mask))


SCHEMA = Schema(
    name="CausalConv",
    version=1,
    inputs=(
        Port("x", Role.DATA, (ir.DataType.FLOAT, ir.DataType.FLOAT16)),
        Port("weight", Role.MATRIX, same_type_as="x"),
        Port("bias", Role.BIAS, same_type_as="x", placeholder=0),
        Port("mask", Role.LENGTH, (ir.DataType.INT64,), placeholder=0),
        Port("state", Role.STATE, same_type_as="x"),
    ),
    outputs=(Port("y", Role.DATA, same_type_as="x"), Port("new_state", Role.STATE, same_type_as="state")),
    attributes={"activation": ir.AttributeType.STRING},
    shapes=lambda shapes, _: (shapes["x"], shapes["state"]),
    cost=cost,
)
