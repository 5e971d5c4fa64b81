"""The schema of ``ai.graphopt::SplitRotary``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphopt.runtime_ops.schema import Cost, Dims, Port, Role, Schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return the most that a call takes for an x of float: two products and a sum for each number."""
    x, cos, sin = shapes
    return Cost(operations=3 * prod(x), bytes=8 * prod(x) + 4 * (prod(cos) + prod(sin)))


def shapes(inputs: Mapping[str, Dims], attributes: Mapping[str, Any]) -> Sequence[Dims]:
    """Return the shapes of queries, keys and values: heads of all sorts have one size."""
    *axes, columns = inputs["x"]
    heads, kv_heads = attributes["heads"], attributes["kv_heads"]
    size = columns // (heads + 2 * kv_heads) if isinstance(columns, int) else None
    return tuple((*axes, None if size is None else count * size) for count in (heads, kv_heads, kv_heads))


SCHEMA = Schema(
    name="SplitRotary",
    version=1,
    inputs=(
        Port("x", Role.DATA, (ir.DataType.FLOAT, ir.DataType.FLOAT16)),
        Port("cos", Role.DATA, same_type_as="x"),
        Port("sin", Role.DATA, same_type_as="x"),
    ),
    outputs=(
        Port("queries", Role.DATA, same_type_as="x"),
        Port("keys", Role.DATA, same_type_as="x"),
        Port("values", Role.DATA, same_type_as="x"),
    ),
    attributes={
        "heads": ir.AttributeType.INT,
        "kv_heads": ir.AttributeType.INT,
        "rotary": ir.AttributeType.INT,
        "rotary_interleaved": ir.AttributeType.INT,
    },
    shapes=shapes,
    cost=cost,
)
