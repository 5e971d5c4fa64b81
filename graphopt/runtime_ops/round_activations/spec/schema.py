"""The schema of ``ai.graphopt::RoundActivations``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphopt.runtime_ops.schema import Coordinates, Cost, Port, Role, Schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what a call takes for an x of float: magnitudes and their maximum, then quotient, rounding and product."""
    numbers = prod(shapes[0])
    return Cost(operations=5 * numbers, bytes=12 * numbers)


def precision(attributes: Mapping[str, Any]) -> str:
    """Return what x is rounded to; a group of 0 is all of a token."""
    mode: str = attributes.get("activations", "unknown")
    return f"{mode} per token" if mode.startswith("int") and not attributes.get("group", 0) else mode


SCHEMA = Schema(
    name="RoundActivations",
    version=1,
    inputs=(Port("x", Role.DATA, (ir.DataType.FLOAT, ir.DataType.FLOAT16)),),
    outputs=(Port("y", Role.DATA, same_type_as="x"),),
    attributes={
        "activations": ir.AttributeType.STRING,
        "group": ir.AttributeType.INT,
        "clip": ir.AttributeType.FLOAT,
    },
    shapes=lambda shapes, _: (shapes["x"],),
    cost=cost,
    coordinates=Coordinates.ROUNDS,
    precision=precision,
)
