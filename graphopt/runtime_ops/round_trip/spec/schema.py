"""The schema of ``ai.graphopt::RoundTrip``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime_ops.schema import Cost, Port, Role, Schema

if TYPE_CHECKING:
    from collections.abc import Sequence


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what a call takes for an x of float: 3 operations a number for the extremes, then 6, in one pass each."""
    numbers = math.prod(shapes[0])
    return Cost(operations=9 * numbers, bytes=12 * numbers)


SCHEMA = Schema(
    name="RoundTrip",
    version=1,
    inputs=(Port("x", Role.DATA, (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)),),
    outputs=(Port("y", Role.DATA, like="x"),),
    attributes={"bits": ir.AttributeType.INT, "symmetric": ir.AttributeType.INT, "clip": ir.AttributeType.FLOAT},
    shapes=lambda shapes, _: (shapes["x"],),
    cost=cost,
    precision=lambda attributes: f"int{attributes.get('bits', 8)}, emulated",
)
