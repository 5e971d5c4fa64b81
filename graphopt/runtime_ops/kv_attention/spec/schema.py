"""The schema of ``ai.graphopt::KVAttention``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphopt.runtime_ops.kv_attention.spec.policies import POLICIES
from graphopt.runtime_ops.kv_attention.spec.storages import STORAGE_OF
from graphopt.runtime_ops.schema import Cost, Dims, Port, Role, Schema

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_PAGES = tuple(dict.fromkeys(ir.DataType.from_numpy(each.dtype) for each in STORAGE_OF.values()))

_TYPES = {int: ir.AttributeType.INT, float: ir.AttributeType.FLOAT, str: ir.AttributeType.STRING}

TOKENS = (
    Port("query", Role.DATA, (ir.DataType.FLOAT, ir.DataType.FLOAT16)),
    Port("key", Role.DATA, same_type_as="query"),
    Port("value", Role.DATA, same_type_as="query", placeholder=0),
)
"""What attention is given of the new tokens."""

SINK_LOGITS = Port("sink_logits", Role.SINKS, (ir.DataType.FLOAT,), placeholder=0)

FEEDBACK = Port("feedback", Role.MATRIX, (ir.DataType.FLOAT16,), is_trailing=True)
"""What the error of a channel of keys changes those behind it by; nodes without ``key_feedback`` end before it."""

STATES = (
    Port("keys", Role.STATE, _PAGES),
    Port("values", Role.STATE, _PAGES),
    Port("scales", Role.STATE, (ir.DataType.FLOAT16,), placeholder=0),
    Port("recent", Role.STATE, (ir.DataType.FLOAT,), placeholder=0),
    Port("summaries", Role.STATE, (ir.DataType.FLOAT,), placeholder=0),
)
"""The parts of a cache: each is an input, and comes back as the output ``new_`` and its name."""

_ATTRIBUTES = {
    **dict.fromkeys(("kv_heads", "window", "page", "sink_pages", "recent_pages"), ir.AttributeType.INT),
    **dict.fromkeys(("sinks", "recent", "budget", "channels", "compensate"), ir.AttributeType.INT),
    **dict.fromkeys(("scale", "softcap", "mass"), ir.AttributeType.FLOAT),
    **dict.fromkeys(("storage", "summary"), ir.AttributeType.STRING),
    "policies": ir.AttributeType.INTS,
}


def outputs_of(states: Sequence[Port]) -> tuple[Port, ...]:
    """Return the outputs of attention: y, and each state after the call."""
    after = (Port(f"new_{state.name}", Role.STATE, same_type_as=state.name) for state in states)
    return (Port("y", Role.DATA, same_type_as="query"), *after)


def shapes_of(states: Sequence[Port]) -> Callable[[Mapping[str, Dims], Mapping[str, Any]], list[Dims]]:
    """Return the function that makes the shapes of these outputs from those of the inputs."""

    def shapes_after(shapes: Mapping[str, Dims], attributes: Mapping[str, Any]) -> list[Dims]:
        *leading, width = shapes["query"]
        value_size, key_width = attributes.get("value_size", 0), shapes["key"][-1]
        if value_size and isinstance(width, int) and isinstance(key_width, int):
            width = width * attributes["kv_heads"] // key_width * value_size
        return [(*leading, width), *(shapes[state.name] for state in states)]

    return shapes_after


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what a call takes that reads the whole cache; a policy that reads less takes less.

    Each query head reads the key and the value of each token: a multiplication and an addition for each of their
    numbers. Shapes tell no types: pages without scales count as float32.
    """
    query, key, _, _, _, _, _, keys, values, scales, *rest_shapes = shapes
    head_size = key[2] // keys[1]
    parts = 2 if prod(values) else 1
    tokens = keys[2] * (rest_shapes[0][3] // (parts * head_size)) if scales[3] else prod(keys[2:]) // head_size
    pages = (prod(keys) + prod(values)) * (1 if scales[3] else 4)
    floats = 2 * prod(query) + 2 * prod(key) + sum(prod(shape) for shape in rest_shapes)
    return Cost(operations=4 * prod(query) * tokens, bytes=pages + 2 * prod(scales) + 4 * floats)


SCHEMA = Schema(
    name="KVAttention",
    version=1,
    inputs=(
        *TOKENS,
        Port("past", Role.LENGTH, (ir.DataType.INT64,)),
        Port("new", Role.LENGTH, (ir.DataType.INT64,)),
        SINK_LOGITS,
        Port("sink_query", Role.DATA, same_type_as="query", placeholder=0),
        *STATES,
        FEEDBACK,
    ),
    outputs=outputs_of(STATES),
    attributes=_ATTRIBUTES,
    optional={
        "clip": ir.AttributeType.FLOAT,
        "value_clip": ir.AttributeType.FLOAT,
        "token_factors": ir.AttributeType.INT,
        "value_size": ir.AttributeType.INT,
        "value_storage": ir.AttributeType.STRING,
        "chunks": ir.AttributeType.INT,
        "key_feedback": ir.AttributeType.INT,
        "slopes": ir.AttributeType.FLOATS,
        **{
            each.name: _TYPES[type(each.absent)]
            for policy in POLICIES.values()
            for each in policy.parameters()
            if each.name not in _ATTRIBUTES
        },
    },
    shapes=shapes_of(STATES),
    cost=cost,
)
