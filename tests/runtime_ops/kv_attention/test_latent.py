"""Values that are the first numbers of keys: one row of a token, which all query heads share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphopt.runtime_ops.kv_attention.spec.attributes import STORAGES, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.reference import reference
from tests.native import needs_library
from tests.runtime_ops.kv_attention.test_body import compare as compare_body
from tests.runtime_ops.kv_attention.test_kernel import compare as compare_kernel
from tests.runtime_ops.kv_cases import Body, Fed, assert_float16_is_widened, attributes_of, tokens_of
from tests.runtime_ops.kv_native import Native

# float32 of scores and sums, as in test_body
CLOSE = 4e-6
LATENT: dict[str, Any] = {"kv_heads": 1, "value_size": 32, "sink_pages": 1, "recent_pages": 1}


def factors_of(storage: str) -> dict[str, Any]:
    """Let tokens have factors where numbers are codes of few bits."""
    return {"token_factors": int(storage in ("int4", "int3", "int2"))}


@pytest.mark.parametrize("storage", ["float32", "float16", "int8", "int4"])
def test_a_row_is_key_and_value(storage: str) -> None:
    """The definition: with keys and values of their own that are the same numbers, y is the same."""
    latent = attributes_of(storage=storage, **LATENT)
    tokens = tokens_of(latent, 40, batch=2, group=5, head_size=64, sink_logits=True)
    y = Fed(latent, tokens, 4).calls(23, 1, 16)
    assert y.shape == (2, 40, 5 * 32)
    twice = attributes_of(storage=storage, **{**LATENT, "value_size": 0})
    whole = Fed(twice, tokens | {"value": tokens["key"]}, 4).calls(23, 1, 16)
    parts = whole.reshape(2, 40, 5, 64)[..., :32].reshape(y.shape)
    # codes of values have a scale per token, codes of rows one per channel
    assert np.abs(y - parts).max() < (CLOSE if not storage.startswith("int") else {"int8": 0.01, "int4": 0.2}[storage])
    states = [attributes.state(1, 4, 64).bytes for attributes in (latent, twice)]
    assert states[0] < 0.55 * states[1]  # values take no pages of their own, and scales and recent tokens less


# the body appends by storage and reads by policy: each storage has one policy, each policy three storages
POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"policies": (1,), "sinks": 18, "recent": 20},
    {"window": 21, "softcap": 3.0},
)


@pytest.mark.parametrize(
    ("storage", "policy"), [(storage, POLICIES[index % len(POLICIES)]) for index, storage in enumerate(STORAGES)]
)
def test_the_body_is_the_reference(storage: str, policy: dict[str, Any]) -> None:
    attributes = attributes_of(storage=storage, **LATENT, **factors_of(storage), **policy)
    tokens = tokens_of(attributes, 80, batch=2, group=3, head_size=48, sink_logits=True)
    pages = 7 if attributes.may_drop else 6
    compare_body(attributes, tokens, pages, [(12, 12, 5), (1,), (7, 0, 7), (1, 1, 0), (40,), (1,)], Body())


@needs_library
@pytest.mark.parametrize("storage", STORAGES)
def test_the_kernel_is_the_reference(instructions: str, storage: str) -> None:
    del instructions
    for policy, group, size, value_size, calls in (
        ({}, 2, 48, 32, (50,)),
        ({"policies": (1,), "sinks": 18, "recent": 20}, 20, 64, 64, (17, 1, 1, 1, 20)),
        ({"page": 64, "window": 33}, 40, 80, 16, (1, 70, 3)),
    ):
        options = {**LATENT, "value_size": value_size, **factors_of(storage), **policy}
        attributes = attributes_of(storage=storage, **options)
        tokens = tokens_of(attributes, sum(calls), batch=2, group=group, head_size=size, sink_logits=True)
        compare_kernel(attributes, tokens, 7, calls)


@needs_library
def test_rows_as_long_as_those_of_large_models(instructions: str) -> None:
    del instructions
    attributes = KVAttributes(1, 0.1, page=64, storage="int8", value_size=512)
    tokens = tokens_of(attributes, 131, group=16, head_size=576)
    compare_kernel(attributes, tokens, 3, (129, 1, 1))


@needs_library
def test_queries_of_float16() -> None:
    options = {**LATENT, "value_size": 16, "storage": "int8"}
    assert_float16_is_widened(Native(), Native(activations=np.float16), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_size": 8}, "a multiple of 16 up to 1280, not 8"),
        ({"value_size": 2048}, "a multiple of 16 up to 1280, not 2048"),
        ({"value_size": 16, "policies": (2,)}, "policies are dense or streaming"),
        ({"value_size": 16, "policies": (1,), "compensate": 1}, "compensate is 0"),
    ],
)
def test_what_latents_cannot_have(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attributes_of(**{"kv_heads": 1, **options})


@needs_library
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_size": 8}, "value_size must be a multiple of 16 up to 1280, it is 8"),
        ({"value_size": 32, "policies": [2]}, "policies are dense or streaming"),
        ({"value_size": 32, "compensate": 1}, "compensate must be 0"),
        ({"value_size": 64}, "value_size is 64, and a head of key has 48 numbers"),
        ({}, "value must have the shape of key"),
    ],
)
def test_the_kernel_refuses(options: dict[str, Any], message: str) -> None:
    attributes = attributes_of(**LATENT)
    tokens = tokens_of(attributes, 4, head_size=48)
    said = {name: value for name, value in attributes.for_node().items() if name != "value_size"} | options
    state = attributes.state(1, 2, 48).zeros()
    lengths = {"past": np.zeros(1, np.int64), "new": np.full(1, 4)}
    order = ("query", "key", "value", "past", "new", "sink_logits", "sink_query")
    inputs = [(tokens | lengths)[name] for name in order]
    with pytest.raises(Exception, match=message):
        Native()(*inputs, *state.values(), **said)


def test_a_value_of_its_own_is_refused() -> None:
    attributes = attributes_of(**LATENT)
    tokens = tokens_of(attributes, 4, head_size=48)
    with pytest.raises(ValueError, match=r"value is float32 \[0\]"):
        Fed(attributes, tokens | {"value": tokens["key"]}, 2, reference).call(4)
