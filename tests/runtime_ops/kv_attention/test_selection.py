"""What KVAttention's mass, channels and compensate mean: the reference against definitions written by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.runtime_ops.kv_attention.spec.attributes import STORAGES, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.policies.policy import candidate_pages
from graphopt.runtime_ops.kv_attention.spec.policies.retrieval import Retrieval, page_weights
from tests.runtime_ops.kv_attention.bound import is_open
from tests.runtime_ops.kv_cases import Fed, assert_same_state, attributes_of, tokens_of

# sums of float64 in another order
SAME = 1e-12

# a running mean in float32 errs by less than 5 x 2^-24 of the largest number, about 4, with each token
MEAN = 5 * 2.0**-24 * 4

SCORES = st.lists(st.sampled_from([-3.0, -1.5, 0.0, 0.25, 2.0, 4.0]), max_size=12).map(
    lambda numbers: np.array(numbers, np.float32)
)


@given(SCORES, st.sampled_from([0.1, 0.5, 0.9, 0.999]), st.integers(0, 5))
def test_the_fewest_best_pages_with_the_mass(scores: np.ndarray, mass: float, budget: int) -> None:
    policy = Retrieval(mass=mass, budget=budget)
    chosen = policy.best_pages(scores, 0.5).tolist()
    by_hand = np.exp(0.5 * scores.astype(np.float64)) / np.exp(0.5 * scores.astype(np.float64)).sum()
    order = sorted(range(len(scores)), key=lambda page: (-scores[page], page))
    assert chosen == order[: len(chosen)]
    if budget and len(chosen) == budget:
        chosen = chosen[:-1]  # the budget may end it sooner, but not later
    elif chosen or len(scores):
        assert by_hand[chosen].sum() >= mass - SAME
    assert by_hand[chosen[:-1]].sum() < mass + SAME


@given(SCORES, st.integers(0, 5))
def test_more_mass_reads_more_pages(scores: np.ndarray, budget: int) -> None:
    chosen = [
        Retrieval(mass=mass, budget=budget).best_pages(scores, 0.25).tolist()
        for mass in (0.01, 0.3, 0.6, 0.9, 0.99, 1.0)
    ]
    for less, more in pairwise(chosen):
        assert more[: len(less)] == less
    assert len(chosen[-1]) == (min(len(scores), budget) if budget else len(scores))
    if len(scores):
        assert len(chosen[0]) == 1


def test_weights_of_scores_that_are_not_finite() -> None:
    infinite = np.array([1, np.inf, -np.inf, np.inf], np.float32)
    for scale in (0.5, 0.0):
        weights = page_weights(infinite, scale)
        assert weights.tolist() == [0, 1, 0, 1]
    assert page_weights(np.full(3, -np.inf, np.float32), 0.25).tolist() == [1, 1, 1]
    assert page_weights(np.array([0, 1, 2], np.float32), -1.0).tolist() == [1, 1, 1]
    assert page_weights(np.zeros(0, np.float32), 0.25).tolist() == []


def test_what_rounding_may_change_is_told() -> None:
    summaries, queries = np.zeros((4, 16), np.float32), np.ones((1, 16))
    # two of four equal pages are just half
    assert is_open(Retrieval(mass=0.5, summary="mean"), 1.0, summaries, queries)
    assert not is_open(Retrieval(mass=0.6, summary="mean"), 1.0, summaries, queries)
    assert not is_open(Retrieval(mass=1.0, summary="mean"), 1.0, summaries, queries)


@given(st.integers(0, 20), st.integers(0, 999), st.integers(1, 3))
def test_channels_are_the_largest_of_the_heads_together(count: int, seed: int, group: int) -> None:
    queries = np.round(np.random.default_rng(seed).standard_normal((group, 16)) * 2) / 4  # many are equal
    used = Retrieval(channels=count).used_channels(queries)
    sums = np.abs(queries).sum(axis=0)
    by_hand = sorted(range(16), key=lambda channel: (-sums[channel], channel))[: count or 16]
    assert used.tolist() == sorted(by_hand)


def test_a_channel_that_is_no_number_is_used() -> None:
    queries = np.ones((2, 16))
    queries[1, 7] = np.nan
    assert Retrieval(channels=2).used_channels(queries).tolist() == [0, 7]


@pytest.mark.parametrize("summary", ["bounds", "mean"])
def test_other_channels_do_not_count(summary: str) -> None:
    policy = Retrieval(channels=3, summary=summary)
    random = np.random.default_rng(0)
    queries, summaries = random.standard_normal((2, 16)), random.standard_normal((5, 32)).astype(np.float32)
    summaries[:, 16:] += 10
    used = policy.used_channels(queries)
    scores = policy.page_scores(summaries, queries)
    narrow = Retrieval(summary=summary).page_scores(summaries[:, [*used, *(used + 16)]], queries[:, used])
    assert np.array_equal(scores, narrow)
    others = np.setdiff1d(np.arange(16), used)
    summaries[:, [*others, *(others + 16)]] = np.nan
    assert np.array_equal(policy.page_scores(summaries, queries), scores)


@given(st.integers(0, 200), st.integers(0, 50), st.integers(1, 60), st.sampled_from([0, 1, 17, 90]))
def test_candidates_are_pages_with_a_token_that_is_not_read_anyway(
    position: int, sinks: int, recent: int, window: int
) -> None:
    attributes = attributes_of(policies=(2,), sinks=sinks, recent=recent, window=window)
    tokens = [
        t for t in range(position + 1) if sinks <= t <= position - recent and (not window or t > position - window)
    ]
    assert candidate_pages(attributes, position).tolist() == sorted({token // 16 for token in tokens})


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("others", [{"mass": 1.0}, {"mass": 1.0, "budget": 5}, {"budget": 5, "channels": 1}])
def test_all_pages_are_dense(storage: str, others: dict[str, Any]) -> None:
    common = {"storage": storage, "recent_pages": 1, "sinks": 3, "window": 60}
    tokens = tokens_of(attributes_of(storage=storage), 70, batch=2, sink_logits=True, sink_query=True)
    sparse = Fed(attributes_of(policies=(2,), **others, **common), tokens, 5).calls(65, 5)
    dense = Fed(attributes_of(**common), tokens, 5).calls(65, 5)
    assert np.array_equal(sparse, dense)


def compensated(attributes: KVAttributes, tokens: Any, columns: int) -> np.ndarray:
    """Streaming with one token more for those that were dropped, by hand: float64 [S, H, G, D] of row 0."""
    heads, size = attributes.kv_heads, tokens["key"].shape[2] // attributes.kv_heads
    key, value = (tokens[name][0].reshape(-1, heads, size).astype(np.float64) for name in ("key", "value"))
    query = tokens["query"][0].reshape(len(key), heads, -1, size).astype(np.float64)
    y = np.zeros_like(query)
    for p in range(columns):
        w = p - attributes.recent + 1
        end = max(w, 0) // attributes.page * attributes.page
        read = [t for t in range(p + 1) if t < attributes.sinks or t >= w]
        for head in range(heads):
            scores = attributes.scale * query[p, head] @ key[read, head].T
            values = value[read, head]
            if end > attributes.sinks:
                dropped = slice(attributes.sinks, end)
                score = attributes.scale * query[p, head] @ key[dropped, head].mean(axis=0)
                if attributes.softcap:
                    score = attributes.softcap * np.tanh(score / attributes.softcap)
                    scores = attributes.softcap * np.tanh(scores / attributes.softcap)
                scores = np.concatenate([scores, score[:, None] + np.log(end - attributes.sinks)], axis=1)
                values = np.concatenate([values, value[dropped, head].mean(axis=0)[None]])
            elif attributes.softcap:
                scores = attributes.softcap * np.tanh(scores / attributes.softcap)
            weights = np.exp(scores)
            y[p, head] = weights @ values / weights.sum(axis=1, keepdims=True)
    return y


@pytest.mark.parametrize("calls", [(90,), (17, 1, 40, 32)])
@pytest.mark.parametrize(("sinks", "recent"), [(0, 1), (5, 9), (16, 20), (37, 3)])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_what_was_dropped_is_one_token(calls: tuple[int, ...], sinks: int, recent: int, softcap: float) -> None:
    attributes = attributes_of(policies=(1,), sinks=sinks, recent=recent, compensate=1, softcap=softcap)
    tokens = tokens_of(attributes, 90)
    y = Fed(attributes, tokens, 6).calls(*calls)[0].reshape(90, 2, 2, 16)
    expected = compensated(attributes, tokens, 90)
    # the mean of a key of 16 channels moves a score by 4 times its own error at most, and a value by itself
    assert np.abs(y - expected).max() < 90 * MEAN * 5


def test_other_heads_are_not_compensated() -> None:
    tokens, others = tokens_of(attributes_of(kv_heads=3), 60), {"kv_heads": 3, "sinks": 2, "recent": 5, "budget": 1}
    y = Fed(attributes_of(policies=(2, 0, 1), compensate=1, **others), tokens, 4).calls(60).reshape(60, 3, 32)
    plain = Fed(attributes_of(policies=(2, 0, 1), **others), tokens, 4).calls(60).reshape(60, 3, 32)
    assert np.array_equal(y[:, :2], plain[:, :2])
    assert np.abs(y[:20, 2] - plain[:20, 2]).max() == 0  # the first page that is dropped whole
    assert np.abs(y[20:, 2] - plain[20:, 2]).min(axis=1).max() > 0


def test_the_mean_is_of_the_floats_before_rounding() -> None:
    tokens = tokens_of(attributes_of(page=32), 60, head_size=32)
    means = [
        Fed(attributes_of(page=32, policies=(1,), storage=storage, compensate=1, sinks=3), tokens, 4)
        for storage in STORAGES
    ]
    for cache in means:
        cache.call(60)
    every = np.concatenate([tokens[name][0, 3:].reshape(57, 2, 32) for name in ("key", "value")], axis=-1).mean(axis=0)
    for cache in means:
        assert np.abs(cache.state["summaries"][0, :, 1] - every).max() < 57 * MEAN
        assert np.array_equal(cache.state["summaries"], means[0].state["summaries"])


@pytest.mark.parametrize("sinks", [0, 18, 32])
def test_a_cache_that_wraps_is_a_longer_cache(sinks: int) -> None:
    attributes = attributes_of(policies=(1,), sinks=sinks, recent=20, compensate=1)
    tokens = tokens_of(attributes, 300, batch=2)
    columns = (9, 1, 12, *(7,) * 39, 5)
    # the pages of sinks, and (P - F) T >= recent + S + 2 T = 64
    wrapped, whole = (Fed(attributes, tokens, pages).calls(*columns) for pages in (4 + -(-sinks // 16), 19))
    assert np.abs(wrapped - whole).max() < SAME
    with pytest.raises(ValueError, match="would have .* tokens, and the cache holds"):
        Fed(attributes, tokens, 3 + -(-sinks // 16)).calls(*columns)


@given(
    st.sampled_from(STORAGES),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.sampled_from([0, 3, 16, 35]),
    st.sampled_from([(1,), (0, 1), (2, 1)]),
)
@settings(max_examples=30)
def test_appending_in_pieces_is_appending_at_once(
    storage: str, calls: list[int], sinks: int, policies: tuple[int, ...]
) -> None:
    attributes = attributes_of(storage=storage, sinks=sinks, policies=policies, compensate=1)
    tokens, pages = tokens_of(attributes, sum(calls), batch=2), -(-sum(calls) // 16)
    in_pieces, at_once = (Fed(attributes, tokens, pages) for _ in range(2))
    in_pieces.calls(*calls)
    at_once.calls(sum(calls))
    assert_same_state(in_pieces.state, at_once.state)


@pytest.mark.parametrize("where", ["key", "value"])
def test_what_is_not_finite_stays_in_the_mean(where: str) -> None:
    attributes = attributes_of(kv_heads=1, policies=(1,), recent=8, compensate=1, sinks=2)
    tokens = tokens_of(attributes, 60)
    tokens[where][0, 20, 3] = np.nan
    is_finite = np.isfinite(Fed(attributes, tokens, 4).calls(60)).all(axis=-1)[0]
    # those that read it, and from position 39 on, where its page was dropped whole, those that read the mean
    assert set(np.flatnonzero(~is_finite).tolist()) == {*range(20, 28), *range(39, 60)}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"mass": -0.1}, "mass is from 0 to 1, not -0.1"),
        ({"mass": 1.5}, "mass is from 0 to 1, not 1.5"),
        ({"mass": float("nan")}, "mass is from 0 to 1, not nan"),
        ({"channels": -1}, "channels is at least 0, not -1"),
        ({"compensate": 2}, "compensate is from 0 to 1, not 2"),
        ({"compensate": 1, "window": 7, "policies": (1,)}, "with a window of the model's own, 7"),
    ],
)
def test_attributes_out_of_range(others: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attributes_of(**others)


def test_shapes_of_summaries() -> None:
    widths = [
        attributes_of(policies=policies, summary=summary, compensate=compensate).state(1, 3, 16).summaries.shape[3]
        for policies in ((1,), (2,))
        for summary in ("bounds", "mean")
        for compensate in (0, 1)
    ]
    assert widths == [0, 32, 0, 32, 32, 64, 16, 48]
