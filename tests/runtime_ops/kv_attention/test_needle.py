"""A needle in a haystack of keys: dense attention and retrieval find it at every depth, streaming in what it reads."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from graphopt.runtime_ops.kv_attention.spec.attributes import DENSE, RETRIEVAL, STREAMING, KVAttributes
from tests.runtime_ops.kv_cases import Body, Fed
from tests.runtime_ops.kv_native import Native
from tools.bench.parts.haystack import GAP, Haystack, Needle, question

HEADS, SIZE, PAGE = 2, 64, 16
DEPTHS = 11
NEEDLE = Needle(cosine=0.95, channels=16, common=0.85)
"""Margin 0.95 sqrt(64 / 0.15) = 19.6 standard deviations, 4.9 of those of the mean key of a page of 16 tokens."""


def attributes(storage: str, **policy: object) -> KVAttributes:
    rounded = int(storage.startswith("int"))
    return KVAttributes(
        kv_heads=HEADS,
        scale=1 / math.sqrt(SIZE),
        page=PAGE,
        storage=storage,
        sink_pages=rounded,
        recent_pages=rounded,
        sinks=8,
        recent=100,
        budget=24,
        **policy,  # type: ignore[arg-type]
    )


@functools.cache
def bound(haystack: Haystack, storage: str, context: int) -> float:
    """How far y may be from a needle's value where the needle's page is read.

    The others have at most the sum of exp(score - score of the needle) of its mass. A key that is stored in a page of
    codes is off by half a step in a channel, span / (2 levels), which moves a score by scale |q| . span / (2 levels) at
    most: that of the needle down, and that of another up. What the others have, times twice the largest value, is the
    one part. The others are a kernel's 1e-3 of the largest value, see the operator's specification, and half a step of
    values from -1 to 1 in codes.
    """
    worst, largest = 0.0, 0.0
    queries = haystack.query.reshape(-1, HEADS, SIZE).astype(np.float64) / math.sqrt(SIZE)
    levels = {"int8": 255, "int4": 15}.get(storage)
    here = haystack.positions
    for head in range(HEADS):
        keys, values = (each.astype(np.float64) for each in haystack.read_tokens(head, 0, context))
        largest = max(largest, float(np.abs(values).max()))
        scores = queries[:, head] @ keys.T
        pages = keys.reshape(-1, PAGE, SIZE)
        off = (pages.max(axis=1) - pages.min(axis=1)) / (2 * (levels or math.inf))
        moved = np.repeat(np.abs(queries[:, head]) @ off.T, PAGE, axis=1)
        each = np.arange(len(here))
        gap = scores[each, here] - moved[each, here]
        others = np.exp(scores + moved - gap[:, None])
        others[each, here] = 0
        mass = others.sum(axis=1)
        worst = max(worst, float((mass / (1 + mass)).max()))
    return 2 * worst * largest + 1e-3 * largest + 1 / (levels or math.inf)


def ask(attrs: KVAttributes, haystack: Haystack, context: int, run: object) -> np.ndarray:
    """Return y of a call of one query for each needle, float32 [needles, Hk, D]."""
    feeds = question(attrs, haystack, context, threads=1)
    y = run(*feeds.values(), **attrs.for_node())[0]  # type: ignore[operator]
    return y.reshape(len(haystack.positions), HEADS, SIZE)


@functools.cache
def haystack(context: int) -> Haystack:
    return Haystack(HEADS, SIZE, np.linspace(0, context - 1, DEPTHS).astype(np.int64), NEEDLE)


@pytest.fixture(scope="module")
def native() -> Native:
    return Native()


@pytest.mark.parametrize("context", [8192, 32768])
def test_needles_and_distractors_are_what_the_test_says(context: int) -> None:
    planted = haystack(context)
    for head in range(HEADS):
        keys, values = planted.read_tokens(head, 0, context)
        queries = planted.query.reshape(DEPTHS, HEADS, SIZE)[:, head]
        # float32 numbers whose squares are 64 in sum
        np.testing.assert_allclose(np.linalg.norm(keys, axis=1), math.sqrt(SIZE), rtol=1e-5)
        needles = keys[planted.positions]
        cosine = (needles * queries).sum(axis=1) / np.linalg.norm(queries, axis=1) / math.sqrt(SIZE)
        np.testing.assert_allclose(cosine, NEEDLE.cosine, rtol=1e-5)
        assert ((queries != 0).sum(axis=1) == NEEDLE.channels).all()
        np.testing.assert_array_equal(values[planted.positions], planted.needle_values[head])
        scores = np.delete(queries @ keys.T / math.sqrt(SIZE), planted.positions, axis=1)
        # the mean of N scores of standard deviation s is off by s / sqrt(N), the deviation by s / sqrt(2 N): 5 of them
        deviation = GAP / NEEDLE.margin(SIZE)
        assert np.abs(scores.mean(axis=1)).max() < 5 * deviation / math.sqrt(context)
        assert np.abs(scores.std(axis=1) / deviation - 1).max() < 5 / math.sqrt(2 * context)
        # parts of a sequence are the same whichever way they are read
        np.testing.assert_array_equal(planted.read_tokens(head, 1000, 3000)[0], keys[1000:3000])


# what a longer context changes is how many pages there are, which no storage sees
@pytest.mark.parametrize(
    ("context", "storage", "summary"),
    [
        *((8192, storage, summary) for storage in ("float32", "int8", "int4") for summary in ("bounds", "mean")),
        (32768, "int4", "bounds"),
        (32768, "float32", "mean"),
    ],
)
def test_retrieval_finds_a_needle_at_every_depth(context: int, storage: str, summary: str, native: Native) -> None:
    planted = haystack(context)
    attrs = attributes(storage, policies=(RETRIEVAL,), summary=summary)
    limit = bound(planted, storage, context)
    assert limit < 0.25  # what is not found is off by more than 0.5, see below
    off = np.abs(ask(attrs, planted, context, native) - planted.needle_values.swapaxes(0, 1))
    assert off.max() <= limit


@pytest.mark.parametrize(("context", "storage"), [(8192, "float32"), (8192, "int4"), (32768, "int4")])
def test_streaming_finds_it_in_what_it_reads_only(context: int, storage: str, native: Native) -> None:
    planted = haystack(context)
    limit = bound(planted, storage, context)
    dense = ask(attributes(storage, policies=(DENSE,)), planted, context, native)
    assert np.abs(dense - planted.needle_values.swapaxes(0, 1)).max() <= limit
    y = ask(attributes(storage, policies=(STREAMING,)), planted, context, native)
    off = np.abs(y - planted.needle_values.swapaxes(0, 1))
    assert off[[0, -1]].max() <= limit
    # An average over a hundred values of mean 0 is 1 away from +1 or -1, in the mean over channels.
    assert off[1:-1].mean(axis=-1).min() > 0.5


def test_the_end_of_what_streaming_reads_is_where_it_says(native: Native) -> None:
    """Sinks 0 to 7, and of each query the newest 100: needles just inside and just outside."""
    context, attrs = 2048, attributes("float32", policies=(STREAMING,))
    # query i stands at 2048 + i and reads what is above 1948 + i
    positions = np.array([7, 8, 1950, 1952])
    planted = Haystack(HEADS, SIZE, positions, NEEDLE)
    off = np.abs(ask(attrs, planted, context, native) - planted.needle_values.swapaxes(0, 1)).mean(axis=(1, 2))
    assert (off < 0.01).tolist() == [True, False, False, True]


@pytest.mark.parametrize("storage", ["float32", "int4"])
@pytest.mark.parametrize(("policy", "summary"), [(STREAMING, "bounds"), (RETRIEVAL, "bounds"), (RETRIEVAL, "mean")])
def test_the_body_finds_what_the_kernel_finds(storage: str, policy: int, summary: str) -> None:
    context = 1024  # the needle before the last lies outside of the newest 100
    planted = Haystack(HEADS, SIZE, np.linspace(0, context - 1, DEPTHS).astype(np.int64), NEEDLE)
    attrs = attributes(storage, policies=(policy,), summary=summary)
    off = np.abs(ask(attrs, planted, context, Body()) - planted.needle_values.swapaxes(0, 1))
    limit = bound(planted, storage, context)
    if policy == RETRIEVAL:
        assert off.max() <= limit
    else:
        assert off[[0, -1]].max() <= limit
        assert off[1:-1].mean(axis=-1).min() > 0.5


@pytest.mark.parametrize("storage", ["float32", "int4"])
def test_a_cache_that_was_fed_call_by_call_keeps_the_needle(storage: str) -> None:
    """The other tests write the cache as the operator would; here it does so itself."""
    context, depth = 1000, 300
    planted = Haystack(HEADS, SIZE, np.array([depth]), NEEDLE)
    keys, values = zip(*(planted.read_tokens(head, 0, context + 1) for head in range(HEADS)), strict=True)
    query = np.zeros((1, context + 1, HEADS * SIZE), np.float32)
    query[0, -1] = planted.query
    none = np.zeros(0, np.float32)
    tokens = {
        "query": query,
        "key": np.stack(keys, axis=1).reshape(1, context + 1, -1),
        "value": np.stack(values, axis=1).reshape(1, context + 1, -1),
        "sink_logits": none,
        "sink_query": none,
    }
    attrs = attributes(storage, policies=(RETRIEVAL,), summary="mean")
    fed = Fed(attrs, tokens, -(-(context + 1) // PAGE), Native(in_place=True))
    y = fed.calls(*[100] * 10, 1)[0, -1].reshape(HEADS, SIZE)
    limit = bound(planted, storage, context // PAGE * PAGE)
    assert limit < 0.25
    assert np.abs(y - planted.needle_values[:, 0]).max() <= limit
