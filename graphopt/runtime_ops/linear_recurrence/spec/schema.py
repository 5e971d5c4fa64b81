"""The schema of ``ai.graphopt::LinearRecurrence``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime_ops.schema import Coordinates, Cost, Port, Role, Schema

if TYPE_CHECKING:
    from collections.abc import Sequence


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what a call takes, token by token, with a delta rule and a decay, in float32.

    Each token reads each number of the state by its key and by its query, decays it, and adds to it.
    """
    query, key, value, decay, beta, mask, state = shapes
    activations = prod(query) + prod(key) + 2 * prod(value) + prod(decay) + prod(beta)
    operations = 7 * prod(value) * state[2]
    return Cost(operations=operations, bytes=4 * (activations + 2 * prod(state)) + 8 * prod(mask))


SCHEMA = Schema(
    name="LinearRecurrence",
    version=1,
    inputs=(
        Port("query", Role.DATA, (ir.DataType.FLOAT, ir.DataType.FLOAT16)),
        Port("key", Role.DATA, same_type_as="query"),
        Port("value", Role.DATA, same_type_as="query"),
        Port("decay", Role.DATA, same_type_as="query", placeholder=0),
        Port("beta", Role.DATA, same_type_as="query", placeholder=0),
        Port("mask", Role.LENGTH, (ir.DataType.INT64,), placeholder=0),
        Port("state", Role.STATE, (ir.DataType.FLOAT,)),
    ),
    outputs=(Port("output", Role.DATA, same_type_as="query"), Port("new_state", Role.STATE, same_type_as="state")),
    attributes={"delta": ir.AttributeType.INT, "scale": ir.AttributeType.FLOAT},
    shapes=lambda shapes, _: (shapes["value"], shapes["state"]),
    cost=cost,
    coordinates=Coordinates.WEIGHS,
)
