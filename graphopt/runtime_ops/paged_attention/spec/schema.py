"""The schema of ``ai.graphopt::PagedAttention``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import onnx_ir as ir

from graphopt.runtime_ops.schema import Cost, Port, Role, Schema

_PAGES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what a call takes in which every page of the block table is full, each request reads all of its pages.

    Each query head reads the key and the value of each token: a multiplication and an addition for each of their
    numbers. Shapes tell no types: all count as float32.
    """
    query, key, _, _, _, table, _, keys, values = shapes
    tokens = prod(query[:-1])
    read = table[1] * keys[1]
    pages = 2 * table[0] * read * prod(keys[2:])
    del values
    return Cost(operations=4 * prod(query) * read, bytes=4 * (2 * prod(query) + 4 * prod(key) + pages) + 4 * tokens)


SCHEMA = Schema(
    name="PagedAttention",
    version=1,
    inputs=(
        Port("query", Role.DATA, (ir.DataType.FLOAT, ir.DataType.FLOAT16)),
        Port("key", Role.DATA, like="query"),
        Port("value", Role.DATA, like="query"),
        Port("starts", Role.LENGTH, (ir.DataType.INT32,)),
        Port("past", Role.LENGTH, (ir.DataType.INT32,)),
        Port("block_table", Role.INDICES, (ir.DataType.INT32,)),
        Port("sink_logits", Role.SINKS, (ir.DataType.FLOAT,), placeholder=0),
        Port("keys", Role.STATE, _PAGES),
        Port("values", Role.STATE, like="keys"),
    ),
    outputs=(
        Port("y", Role.DATA, like="query"),
        Port("new_keys", Role.STATE, like="keys"),
        Port("new_values", Role.STATE, like="values"),
    ),
    attributes={
        **dict.fromkeys(("kv_heads", "window"), ir.AttributeType.INT),
        **dict.fromkeys(("scale", "softcap"), ir.AttributeType.FLOAT),
    },
    shapes=lambda shapes, attributes: (shapes["query"], shapes["keys"], shapes["values"]),
    cost=cost,
)
