"""The error bounds of KVAttention hold, and are not far above the errors."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.runtime_ops.kv_attention.spec.attributes import STORAGES, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.readings import readings
from graphopt.runtime_ops.kv_attention.spec.reference import reference
from tests.pairwise import pairwise
from tests.runtime_ops.kv_attention.bound import LEVELS, bound, storage_bound
from tests.runtime_ops.kv_cases import INPUTS, STATE, Arrays, Body, Fed, attributes_of, tokens_of

EACH_STORAGE = pytest.mark.parametrize("storage", STORAGES)

POLICIES: dict[str, dict[str, Any]] = {
    "dense": {"softcap": 4.0},
    "streaming": {"policies": (1,), "sinks": 5, "recent": 40},
    "retrieval": {"policies": (2,), "sinks": 5, "recent": 10, "budget": 2},
}


class Last:
    """A run that keeps the inputs of the last call, and what it returned."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.inputs: tuple[np.ndarray, ...] = ()
        self.y = np.zeros(0)

    def __call__(self, *inputs: np.ndarray, **attributes: Any) -> Any:
        self.inputs = inputs
        outputs = self.run(*inputs, **attributes)
        self.y = outputs[0]
        return outputs


def last_call(attributes: KVAttributes, tokens: Arrays, run: Any = reference) -> Last:
    """Feed 80 tokens at once to the reference and then 20 to ``run``, and return the second call."""
    last = Last(run)
    fed = Fed(attributes, tokens, 7)
    fed.call(80)
    fed.run = last
    fed.call(20)
    return last


# its sessions serve calls of any size
BODY = Body()


def rounded(factors: np.ndarray) -> np.ndarray:
    """Rows of factors as multiples of their largest / LEVELS."""
    step = np.maximum(np.abs(factors).max(axis=-1, keepdims=True), 1e-30) / LEVELS
    return np.rint(factors / step) * step


def with_15_bits(*inputs: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
    """The operator, with what multiplies codes rounded to 15 bits; no softcap and no sinks with their own query."""
    attrs = KVAttributes(**attributes)
    state, every = readings(attrs, inputs)
    query, key = inputs[:2]
    y = np.zeros((*key.shape[:2], attrs.kv_heads, query.shape[2] // key.shape[2], key.shape[2] // attrs.kv_heads))
    for reading in every:
        keys, values, page = reading.keys, reading.values, reading.positions // attrs.page
        for n, is_read in enumerate(reading.is_read):
            factors = rounded(reading.q[n][:, None] * keys.step)
            scores = attrs.scale * (reading.q[n] @ keys.low.T + (factors * keys.codes).sum(axis=-1))
            weights = np.exp(np.where(is_read, scores - scores.max(), -np.inf))
            weights /= weights.sum(axis=-1, keepdims=True)
            out = weights @ values.low
            for each in np.unique(page):
                factors = rounded(weights[:, page == each] * values.step[page == each, 0])
                out += factors @ values.codes[page == each]
            y[reading.row, reading.columns.start + n, reading.head] = out
    return (y.reshape(query.shape), *state.values())


# each storage with one policy and one size; test_kernel holds kernels to the same bound for each storage and policy
@pytest.mark.parametrize(
    ("storage", "policy", "size"),
    [
        (storage, policy, size)
        for storage, (size, policy) in zip(STORAGES, cycle(product([1.0, 10.0, 1e-20], POLICIES)), strict=False)
    ],
)
def test_the_body_is_within(storage: str, policy: str, size: float) -> None:
    attributes = attributes_of(storage=storage, recent_pages=1, **POLICIES[policy])
    tokens = tokens_of(attributes, 100, batch=2, head_size=32, sink_logits=True, sink_query=True)
    tokens["key"] *= np.float32(size)
    exact, body = (last_call(attributes, tokens, run) for run in (reference, BODY))
    limits = bound(*exact.inputs, **attributes.for_node())
    assert (np.abs(body.y - exact.y) <= limits).all()
    # what 15 bits may cost is in there too; without codes it is float32 alone
    if not storage.startswith("int"):
        assert limits.max() < 2e-4 * max(size, 1)


@pytest.mark.parametrize("storage", ["int8", "int4"])
@given(st.integers(0, 999), st.sampled_from([0.1, 1.0, 8.0]), st.sampled_from([16, 64]))
@settings(max_examples=10, deadline=None)
def test_factors_of_15_bits_are_within(storage: str, seed: int, size: float, page: int) -> None:
    attributes = attributes_of(storage=storage, page=page, policies=(1,), recent=70)
    tokens = tokens_of(attributes, 100, batch=1, head_size=32, seed=seed)
    tokens["query"] *= np.float32(size)
    exact, kernel = (last_call(attributes, tokens, run) for run in (reference, with_15_bits))
    error, limits = np.abs(kernel.y - exact.y), bound(*exact.inputs, **attributes.for_node())
    assert (error <= limits).all()
    assert error.max() > 0


def test_factors_of_15_bits_come_near() -> None:
    # one page of codes, one query: each factor of a score errs by half a step, all in the same direction
    attributes = attributes_of(kv_heads=1, storage="int8", policies=(1,), recent=40, scale=1e-2)
    tokens = tokens_of(attributes, 32, head_size=256, group=1)
    tokens["key"][:] = 0
    tokens["key"][0, 1] = 255  # step 1, low 0, code 255 for one token
    tokens["value"][:] = 0
    tokens["value"][0, 1] = 1  # stored as it is, with code 0
    tokens["query"][:] = LEVELS - 0.4999
    tokens["query"][..., ::2] *= -1
    tokens["query"][..., :2] = LEVELS, -LEVELS
    tokens["query"][..., 2::2] = -0.4999
    tokens["query"][..., 3::2] = 0.5001
    tokens["query"] *= np.float32(1e-3)
    exact, kernel = (last_call_of(attributes, tokens, run) for run in (reference, with_15_bits))
    error = np.abs(kernel.y - exact.y)[0, -1].max()
    limit = bound(*exact.inputs, **attributes.for_node())[0, -1].max()
    assert 0.1 * limit < error <= limit


def last_call_of(attributes: KVAttributes, tokens: Arrays, run: Any) -> Last:
    last = Last(run)
    Fed(attributes, tokens, 2, last).calls(31, 1)
    return last


@pytest.mark.parametrize(
    ("storage", "policy", "size"),
    pairwise(["float16", "bfloat16", "float8", "int8", "int4"], list(POLICIES), [0.1, 1.0, 5.0]),
)
def test_storages_are_within(storage: str, policy: str, size: float) -> None:
    one, other = (attributes_of(storage=each, **POLICIES[policy]) for each in (storage, "float32"))
    tokens = tokens_of(one, 100, batch=2, head_size=32, sink_logits=True, sink_query=True)
    tokens["key"] *= np.float32(size)
    stored, exact = (last_call(attributes, tokens) for attributes in (one, other))
    error, limits = np.abs(stored.y - exact.y), storage_bound(*stored.inputs, **one.for_node())
    assert (error <= limits).all()
    assert error.max() > 0
    # y cannot leave the values, whatever scores err by
    assert (limits <= 3 * np.abs(tokens["value"]).max()).all()


def test_the_worst_values_come_near() -> None:
    # all scores are 0, so y is the mean of the values; each of them lies halfway between two codes
    attributes = attributes_of(kv_heads=1, storage="int4")
    tokens = tokens_of(attributes, 64, group=1)
    tokens["key"][:] = 0
    tokens["value"][:] = 0.5 + 2.0 * (np.arange(16) % 2)
    tokens["value"][..., :2] = 0, 15
    fed = Fed(attributes, tokens, 4, last := Last(reference))
    fed.calls(63, 1)
    error = np.abs(last.y - tokens["value"][0].mean(axis=0))[0, 0].max()
    limit = storage_bound(*last.inputs, **attributes.for_node())[0, 0].max()
    assert 0.99 * limit < error <= limit


@pytest.mark.parametrize(("storage", "share"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8), ("float8", 2.0**-4)])
def test_the_worst_floats_come_near(storage: str, share: float) -> None:
    # all scores are 0, so y is the mean of the values; each of them lies halfway between two numbers
    attributes = attributes_of(kv_heads=1, storage=storage)
    tokens = tokens_of(attributes, 64, group=1)
    tokens["key"][:] = 0
    tokens["value"][:] = 1 + share
    fed = Fed(attributes, tokens, 4, last := Last(reference))
    fed.calls(63, 1)
    error = np.abs(last.y - tokens["value"][0].mean(axis=0))[0, 0].max()
    limit = storage_bound(*last.inputs, **attributes.for_node())[0, 0].max()
    assert 0.9 * limit < error <= limit


@pytest.mark.parametrize("where", ["key", "value"])
def test_nothing_is_promised_where_float8_may_have_cut_off(where: str) -> None:
    attributes = attributes_of(kv_heads=1, storage="float8", policies=(1,), recent=8)
    tokens = tokens_of(attributes, 100)
    tokens[where][0, 90, 3] = 1e6
    call = last_call(attributes, tokens)
    spoiled = np.isinf(storage_bound(*call.inputs, **attributes.for_node())[0]).any(axis=-1)
    assert np.flatnonzero(spoiled).tolist() == list(range(10, 18))
    # the kernel reads 448, and computes with it as with others
    assert np.isfinite(bound(*call.inputs, **attributes.for_node())).all()


def test_float32_costs_nothing() -> None:
    attributes = attributes_of()
    call = last_call(attributes, tokens_of(attributes, 100))
    assert storage_bound(*call.inputs, **attributes.for_node()).max() < 1e-12  # of float64 itself


@EACH_STORAGE
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nothing_is_promised_for_what_is_not_finite(storage: str, where: str) -> None:
    attributes = attributes_of(kv_heads=1, storage=storage, policies=(1,), recent=8, recent_pages=9)
    tokens = tokens_of(attributes, 100)
    tokens[where][0, 90] = np.nan
    call = last_call(attributes, tokens)
    for each in (bound, storage_bound):
        limits = each(*call.inputs, **attributes.for_node())[0]
        spoiled = range(10, 11) if where == "query" else range(10, 18)
        assert np.isinf(limits[list(spoiled)]).all()
        assert np.isfinite(np.delete(limits, list(spoiled), axis=0)).all()


def test_nothing_is_promised_beyond_float32() -> None:
    attributes = attributes_of()
    tokens = tokens_of(attributes, 100)
    tokens["key"][0, 90] = 3e38
    limits = bound(*last_call(attributes, tokens).inputs, **attributes.for_node())[0]
    assert np.isfinite(limits[:10]).all()
    assert np.isinf(limits[10:]).all()


def test_padding_is_exact() -> None:
    attributes = attributes_of()
    tokens, state = tokens_of(attributes, 4), attributes.state(1, 1, 16).zeros()
    inputs = {**tokens, "past": np.array([0]), "new": np.array([1]), **state}
    limits = bound(*(inputs[name] for name in (*INPUTS, *STATE)), **attributes.for_node())
    assert not limits[0, :3].any()
    assert limits[0, 3].all()


def test_the_sign_of_steps_does_not_matter() -> None:
    # a state may come from anywhere: low and step negated are the negated number, so only the sign of y changes
    attributes = attributes_of(storage="int4", policies=(1,), recent=70)
    call = Last(reference)
    Fed(attributes, tokens_of(attributes, 100, batch=1, head_size=32), 7, call).calls(96, 4)  # the last fills no page
    inputs = dict(zip((*INPUTS, *STATE), call.inputs, strict=True))
    limits = []
    for of_keys, of_values in ((1, 1), (-1, 1), (1, -1)):
        scales = inputs["scales"].copy()
        scales[..., :64] *= of_keys
        scales[..., 64:] *= of_values
        signed = {**inputs, "scales": scales, "recent": np.zeros_like(inputs["recent"])}
        for name, sign in (("query", of_keys), ("key", of_keys), ("value", of_values)):
            signed[name] = inputs[name] * sign
        limits.append(bound(*signed.values(), **attributes.for_node()))
    assert limits[0].max() > 0
    assert np.array_equal(limits[0], limits[1])
    assert np.array_equal(limits[0], limits[2])
