"""The schema of ``ai.graphopt::SwiGLU``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphopt.runtime_ops.schema import Cost, Dims, Port, Role, Schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what a call takes for an x of float: an exponential, a sum, a quotient and two products for each of y."""
    numbers = prod(shapes[0])
    return Cost(operations=5 * numbers // 2, bytes=6 * numbers)


def shapes(inputs: Mapping[str, Dims], attributes: Mapping[str, Any]) -> Sequence[Dims]:
    """Return the shape of y: half of the last axis of x."""
    del attributes
    *axes, columns = inputs["x"]
    return ((*axes, columns // 2 if isinstance(columns, int) else None),)


SCHEMA = Schema(
    name="SwiGLU",
    version=1,
    inputs=(Port("x", Role.DATA, (ir.DataType.FLOAT, ir.DataType.FLOAT16)),),
    outputs=(Port("y", Role.DATA, same_type_as="x"),),
    attributes={},
    shapes=shapes,
    cost=cost,
)
