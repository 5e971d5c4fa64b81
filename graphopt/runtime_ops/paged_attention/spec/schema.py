"""The schema of ``ai.graphopt::PagedAttention``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime_ops.kv_attention.spec.schema import FEEDBACK, SINK_LOGITS, TOKENS, outputs_of, shapes_of
from graphopt.runtime_ops.paged_attention.spec.layout import STORAGES
from graphopt.runtime_ops.schema import Cost, Port, Role, Schema

if TYPE_CHECKING:
    from collections.abc import Sequence

CHOICE = Port("choice", Role.INDICES, (ir.DataType.INT32,), is_trailing=True)
"""The positions that each token reads; nodes without ``chooses`` end before it, others have an empty ``feedback``."""

_BLOCKS = tuple(dict.fromkeys(ir.DataType.from_numpy(storage.dtype) for storage in STORAGES.values()))

POOLS = (
    Port("keys", Role.STATE, _BLOCKS),
    Port("values", Role.STATE, same_type_as="keys"),
    Port("key_scales", Role.STATE, (ir.DataType.FLOAT,), placeholder=0),
    Port("value_scales", Role.STATE, (ir.DataType.FLOAT,), placeholder=0),
)
"""The caches that requests share: each is an input, and comes back as the output ``new_`` and its name."""


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what a call takes in which every page of the block table is full, each request reads all of its pages.

    Each query head reads the key and the value of each token: a multiplication and an addition for each of their
    numbers. Shapes tell no types: blocks without scales count as float32.
    """
    query, key, value, _, _, table, _, keys, _, scales, *_ = shapes
    tokens = prod(query[:-1])
    cache_numbers = table[1] * keys[1]
    width = 1 if prod(scales) else 4
    pages = 2 * table[0] * cache_numbers * (width * prod(keys[2:]) + (4 * keys[2] if prod(scales) else 0))
    new = 4 * (2 * prod(query) + prod(key) + prod(value)) + 2 * tokens * width * prod(keys[2:]) + 4 * tokens
    return Cost(operations=4 * prod(query) * cache_numbers, bytes=pages + new)


SCHEMA = Schema(
    name="PagedAttention",
    version=1,
    inputs=(
        *TOKENS,
        Port("starts", Role.LENGTH, (ir.DataType.INT32,)),
        Port("past", Role.LENGTH, (ir.DataType.INT32,)),
        Port("block_table", Role.INDICES, (ir.DataType.INT32,)),
        SINK_LOGITS,
        *POOLS,
        FEEDBACK,
        CHOICE,
    ),
    outputs=outputs_of(POOLS),
    attributes={
        **dict.fromkeys(("kv_heads", "window"), ir.AttributeType.INT),
        **dict.fromkeys(("scale", "softcap"), ir.AttributeType.FLOAT),
        "storage": ir.AttributeType.STRING,
    },
    optional={
        **dict.fromkeys(("value_size", "chunks", "key_feedback", "chooses", "residuals"), ir.AttributeType.INT),
        "slopes": ir.AttributeType.FLOATS,
    },
    shapes=shapes_of(POOLS),
    cost=cost,
)
