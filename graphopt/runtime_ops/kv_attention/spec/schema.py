"""The schema of ``ai.graphopt::KVAttention``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import onnx_ir as ir

from graphopt.runtime_ops.kv_attention.spec.storages import STORAGE_OF
from graphopt.runtime_ops.schema import Cost, Dims, Port, Role, Schema

_PAGES = tuple(dict.fromkeys(ir.DataType.from_numpy(each.dtype) for each in STORAGE_OF.values()))

STATES = (
    Port("keys", Role.STATE, _PAGES),
    Port("values", Role.STATE, _PAGES),
    Port("scales", Role.STATE, (ir.DataType.FLOAT,), placeholder=0),
    Port("recent", Role.STATE, (ir.DataType.FLOAT,), placeholder=0),
    Port("summaries", Role.STATE, (ir.DataType.FLOAT,), placeholder=0),
)
"""The parts of a cache: each is an input, and comes back as the output ``new_`` and its name."""


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what a call takes that reads the whole cache; a policy that reads less takes less.

    Each query head reads the key and the value of each token: a multiplication and an addition for each of their
    numbers. Shapes tell no types: pages without scales count as float32.
    """
    query, key, _, _, _, _, _, keys, values, scales, *others = shapes
    head_size = key[2] // keys[1]
    tokens = keys[2] * (scales[3] // 2 - head_size) if scales[3] else prod(keys[2:]) // head_size
    pages = (prod(keys) + prod(values)) * (1 if scales[3] else 4)
    floats = 2 * prod(query) + 2 * prod(key) + prod(scales) + sum(prod(shape) for shape in others)
    return Cost(operations=4 * prod(query) * tokens, bytes=pages + 4 * floats)


def _shapes(shapes: Mapping[str, Dims], attributes: Mapping[str, Any]) -> list[Dims]:
    del attributes
    return [shapes["query"], *(shapes[state.name] for state in STATES)]


SCHEMA = Schema(
    name="KVAttention",
    version=1,
    inputs=(
        Port("query", Role.DATA, (ir.DataType.FLOAT, ir.DataType.FLOAT16)),
        Port("key", Role.DATA, like="query"),
        Port("value", Role.DATA, like="query"),
        Port("past", Role.LENGTH, (ir.DataType.INT64,)),
        Port("new", Role.LENGTH, (ir.DataType.INT64,)),
        Port("sink_logits", Role.SINKS, (ir.DataType.FLOAT,), placeholder=0),
        Port("sink_query", Role.DATA, like="query", placeholder=0),
        *STATES,
    ),
    outputs=(
        Port("y", Role.DATA, like="query"),
        *(Port(f"new_{state.name}", Role.STATE, like=state.name) for state in STATES),
    ),
    attributes={
        **dict.fromkeys(("kv_heads", "window", "page", "sink_pages", "recent_pages"), ir.AttributeType.INT),
        **dict.fromkeys(("sinks", "recent", "budget", "channels", "compensate"), ir.AttributeType.INT),
        **dict.fromkeys(("scale", "softcap", "mass"), ir.AttributeType.FLOAT),
        **dict.fromkeys(("storage", "summary"), ir.AttributeType.STRING),
        "policies": ir.AttributeType.INTS,
    },
    shapes=_shapes,
    cost=cost,
)
