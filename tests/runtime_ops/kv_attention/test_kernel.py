"""The CPU kernel of KVAttention against the reference: every storage, policy and set of instructions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from graphopt.runtime_ops.kv_attention.spec.attributes import FLOATS, LEVELS, STORAGES, KVAttributes
from tests.native import needs_library
from tests.pairwise import pairwise
from tests.runtime_ops.kv_cases import (
    INPUTS,
    PAIRS,
    STATE,
    Arrays,
    Body,
    Bounded,
    Fed,
    Run,
    any_calls,
    assert_float16_is_widened,
    assert_same_state,
    attributes_of,
    tokens_of,
)
from tests.runtime_ops.kv_native import NODE, Native

pytestmark = needs_library

POLICIES = ([0], [1], [2], [0, 2], [1, 2])
SOME = {"sinks": 5, "recent": 9, "budget": 2, "sink_pages": 1, "recent_pages": 1}


def compare(
    attributes: KVAttributes,
    tokens: Arrays,
    pages: int,
    calls: Sequence[int],
    *,
    new: Sequence[Sequence[int]] | None = None,
    run: Run | None = None,
) -> list[np.ndarray]:
    """Feed the reference and the kernel the same calls and compare what they return; return the kernel's y."""
    bounded = Bounded()
    wanted, found = Fed(attributes, tokens, pages, bounded), Fed(attributes, tokens, pages, run or Native())
    results = []
    for index, columns in enumerate(calls):
        of_rows = None if new is None else new[index]
        expected, y = wanted.call(columns, of_rows), found.call(columns, of_rows)
        assert y.shape == expected.shape
        assert y.dtype == np.float32
        if attributes.summary == "mean" or attributes.compensate:  # running means; the kernel may divide in another way
            difference = np.abs(wanted.state["summaries"] - found.state["summaries"])
            assert difference.max(initial=0) < 1e-6 * np.abs(tokens["key"]).max(initial=1)
            found.state["summaries"] = wanted.state["summaries"]
        assert_same_state(wanted.state, found.state)
        assert (np.abs(expected - y) <= bounded.most).all()
        results.append(y)
    return results


# each storage with each policy, and both with each page and each pair of head sizes; test_any_shape mixes them all
SIZES = (
    ((2, 16, (50,)), (3, 32, (17, 1, 1, 1, 40))),
    ((1, 80, (1, 1, 100, 1)), (5, 48, (70, 0, 3))),
)


@pytest.mark.parametrize(("storage", "policies", "page", "sizes"), pairwise(STORAGES, POLICIES, [16, 64], SIZES))
def test_the_kernel_is_the_reference(
    instructions: str, storage: str, policies: list[int], page: int, sizes: Any
) -> None:
    for group, size, calls in sizes:
        # only retrieval makes summaries of pages
        for summary in ("bounds", "mean") if 2 in policies else ("bounds",):
            attributes = attributes_of(storage=storage, policies=policies, page=page, summary=summary, **SOME)
            tokens = tokens_of(
                attributes, sum(calls), batch=2, group=group, head_size=size, sink_logits=True, sink_query=group == 3
            )
            compare(attributes, tokens, 10, calls)


@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_keys_and_values_of_different_bits(instructions: str, keys: str, values: str) -> None:
    policies, factors = POLICIES[int(keys[3]) % len(POLICIES)], int(values == "int2")
    attributes = attributes_of(storage=keys, value_storage=values, policies=policies, token_factors=factors, **SOME)
    for group, size, calls in ((2, 32, (50,)), (3, 96, (70, 1, 1, 40))):
        tokens = tokens_of(attributes, sum(calls), batch=2, group=group, head_size=size, sink_logits=True)
        compare(attributes, tokens, 10, calls)


@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_errors_of_channels_go_to_those_behind_them(instructions: str, keys: str, values: str) -> None:
    factors, clip = int(values == "int2"), 0.7 if keys == "int4" else 1.0
    options: dict[str, Any] = {"storage": keys, "value_storage": values, "key_feedback": 1, "clip": clip}
    if values == "int1":
        options["value_clip"] = 0.5
    attributes = attributes_of(token_factors=factors, **options, **SOME)
    for group, size, calls in ((2, 32, (50,)), (3, 96, (70, 1, 1, 40))):
        tokens = tokens_of(attributes, sum(calls), batch=2, group=group, head_size=size)
        compare(attributes, tokens, 10, calls)


@pytest.mark.parametrize("storage", LEVELS)
def test_what_is_not_finite_stays_in_its_channel(instructions: str, storage: str) -> None:
    attributes = attributes_of(storage=storage, key_feedback=1)
    tokens = tokens_of(attributes, 70, head_size=32)
    tokens["key"][0, 20, 1], tokens["key"][0, 3, 36] = np.nan, np.inf
    wanted, found = Fed(attributes, tokens, 10), Fed(attributes, tokens, 10, Native())
    for fed in (wanted, found):
        fed.calls(50, 1, 19)
    assert_same_state(wanted.state, found.state)
    lows = wanted.state["scales"][0, 0, :2, :32]
    assert np.isnan(lows).sum() == 1


@pytest.mark.parametrize("run", [Body(), Native()], ids=["body", "kernel"])
@pytest.mark.parametrize("storage", ["int8", "int2"])
def test_scales_of_numbers_that_float16_does_not_have_are_at_its_ends(
    instructions: str, storage: str, run: Run
) -> None:
    attributes = attributes_of(storage=storage, clip=0.9, token_factors=1)
    tokens = tokens_of(attributes, 70, head_size=32)
    for name in ("key", "value"):
        tokens[name][..., :8] *= 1e7
        tokens[name][..., 8:12] *= -1e30
        tokens[name][..., 12:24] *= 1e-8
        tokens[name][:, ::2] += np.float32(3)
    wanted, found = Fed(attributes, tokens, 10), Fed(attributes, tokens, 10, run)
    for fed in (wanted, found):
        fed.calls(50, 20)
    assert_same_state(wanted.state, found.state)
    assert np.isfinite(wanted.state["scales"]).all()
    assert np.abs(wanted.state["scales"]).max() == 65504


SELECTIONS: tuple[dict[str, Any], ...] = (
    {"policies": [2], "mass": 0.8},
    {"policies": [2, 0], "mass": 0.5, "budget": 2, "summary": "mean", "window": 60},
    {"policies": [2], "channels": 7, "budget": 2},
    {"policies": [2], "channels": 20, "mass": 0.7, "summary": "mean"},
    {"policies": [1], "compensate": 1},
    {"policies": [1], "compensate": 1, "softcap": 2.0, "sinks": 0},
    {"policies": [2, 1], "compensate": 1, "budget": 1, "sinks": 16},
    {"policies": [2, 1], "compensate": 1, "mass": 0.9, "summary": "mean", "channels": 5},
)


# what is chosen is the same whatever pages are stored as
@pytest.mark.parametrize(
    ("others", "storage"),
    [(others, STORAGES[index % len(STORAGES)]) for index, others in enumerate(SELECTIONS)],
)
def test_what_is_chosen_and_what_stands_for_the_rest(instructions: str, storage: str, others: dict[str, Any]) -> None:
    attributes = attributes_of(storage=storage, **{"sinks": 5, "recent": 9, "recent_pages": 1, **others})
    for group, size, calls in ((2, 16, (80, 1, 1)), (3, 48, (17, 1, 1, 40)), (1, 128, (70, 0, 33, 1))):
        tokens = tokens_of(attributes, sum(calls), batch=2, group=group, head_size=size, sink_logits=True)
        compare(attributes, tokens, 8, calls)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_compensated_cache_that_wraps(instructions: str, storage: str) -> None:
    for sinks in (20, 0):
        attributes = attributes_of(storage=storage, policies=[1], sinks=sinks, recent=20, recent_pages=1, compensate=1)
        calls = (30, 30, 1, 1, 30, 30, 1, 16, 1, 40)
        compare(attributes, tokens_of(attributes, sum(calls), batch=2), 9, calls)


def test_without_the_newer_attributes_they_have_their_defaults() -> None:
    attributes = attributes_of(policies=[2, 1], budget=1)
    older = {
        name: value for name, value in attributes.for_node().items() if name not in ("mass", "channels", "compensate")
    }
    inputs = inputs_of(attributes)
    for one, other in zip(
        Native()(*inputs.values(), **older), Native()(*inputs.values(), **attributes.for_node()), strict=True
    ):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("others", SELECTIONS)
def test_what_is_chosen_of_many_pages(instructions: str, others: dict[str, Any]) -> None:
    attributes = attributes_of(**{"sinks": 5, "recent": 9, **others, "window": 0})
    tokens = tokens_of(attributes, 1703)
    seen, bounded = Fed(attributes, tokens, 110, Native()), Bounded()
    seen.call(1700)  # many blocks of queries
    wanted = Fed(attributes, tokens, 110, bounded)
    wanted.state, wanted.past, wanted.column = dict(seen.state), seen.past, seen.column
    for columns in (1, 2):  # whose pages are shared out
        expected, y = wanted.call(columns), seen.call(columns)
        assert (np.abs(expected - y) <= bounded.most).all()


@pytest.mark.parametrize("others", SELECTIONS)
def test_threads_choose_the_same(others: dict[str, Any]) -> None:
    attributes = attributes_of(**{"page": 32, "sinks": 40, "recent": 100, **others, "window": 0})
    calls = (2100, 1, 1, 7)
    tokens = tokens_of(attributes, sum(calls), group=4, head_size=32)
    caches = [Fed(attributes, tokens, 68, run) for run in (Native(1), Native(2), Native(2, in_place=True))]
    for columns in calls:
        first, *rest = [cache.call(columns) for cache in caches]
        for cache, y in zip(caches[1:], rest, strict=True):
            assert np.array_equal(first, y)
            assert_same_state(caches[0].state, cache.state)


# every storage and every policy, twice at least, where test_the_kernel_is_the_reference has each with each
SOME_OF_BOTH = [
    (storage, POLICIES[(index + more) % len(POLICIES)]) for index, storage in enumerate(STORAGES) for more in (0, 2)
]
# every storage and every policy once at least, for what takes long
FEW_OF_BOTH = SOME_OF_BOTH[::2]


@pytest.mark.parametrize(("storage", "policies"), SOME_OF_BOTH)
def test_windows_and_softcaps(instructions: str, storage: str, policies: list[int]) -> None:
    attributes = attributes_of(storage=storage, policies=policies, window=20, softcap=3.0, sinks=5, recent=30, budget=1)
    compare(attributes, tokens_of(attributes, 55, batch=2), 5, (50, 3, 1, 1))
    attributes = attributes_of(storage=storage, policies=policies, window=50, sinks=20, recent=7, budget=2, chunks=1)
    compare(attributes, tokens_of(attributes, 125, sink_query=True), 8, (90, 1, 33, 1))


@pytest.mark.parametrize("storage", STORAGES)
def test_biases_by_distance(instructions: str, storage: str) -> None:
    """Slopes as those of ALiBi, one that grows with the distance, and none; rows that begin at other positions."""
    slopes = [0.25, 0.0625, 0.0, -0.01]
    attributes = attributes_of(storage=storage, kv_heads=2, slopes=slopes, sink_pages=1)
    new = ((50, 7), (0, 2), (1, 1))
    compare(attributes, tokens_of(attributes, 53, batch=2, group=2), 5, (50, 2, 1), new=new)
    attributes = attributes_of(storage=storage, kv_heads=2, slopes=slopes, policies=[1], sinks=5, recent=20)
    compare(attributes, tokens_of(attributes, 73, group=2, sink_logits=True, sink_query=True), 5, (70, 1, 1, 1))


@pytest.mark.parametrize(("storage", "policies"), SOME_OF_BOTH)
def test_rows_of_different_lengths(instructions: str, storage: str, policies: list[int]) -> None:
    attributes = attributes_of(storage=storage, policies=policies, sinks=20, recent=3, budget=2, sink_pages=1)
    new = ((50, 7, 0), (0, 0, 0), (0, 2, 2), (1, 0, 1), (1, 30, 2))
    results = compare(attributes, tokens_of(attributes, 50 + 4 + 2 + 1 + 30, batch=3), 9, (50, 4, 2, 1, 30), new=new)
    for y, of_rows in zip(results, new, strict=True):
        for row, count in enumerate(of_rows):
            assert not y[row, : y.shape[1] - count].any(), "padding is 0"


@pytest.mark.parametrize("storage", STORAGES)
def test_a_cache_that_wraps(instructions: str, storage: str) -> None:
    for sinks, recent_pages in ((20, 1), (0, 0)):
        attributes = attributes_of(
            storage=storage, policies=[1], sinks=sinks, recent=20, recent_pages=recent_pages, sink_pages=sinks // 16
        )
        calls = (30, 30, 1, 1, 30, 30, 1, 16, 1, 40)
        compare(attributes, tokens_of(attributes, sum(calls), batch=2), 8, calls)


@pytest.mark.parametrize(("storage", "policies"), FEW_OF_BOTH)
def test_in_place_and_with_two_threads_it_gives_the_same_bits(storage: str, policies: list[int]) -> None:
    attributes = attributes_of(storage=storage, policies=policies, page=32, sinks=40, recent=100, budget=20, kv_heads=2)
    calls = (2100, 1, 1, 7)  # one call of many blocks of queries, and others whose pages are shared out
    tokens = tokens_of(attributes, sum(calls), sink_logits=True)
    runs = [Native(1), Native(1, in_place=True), Native(2), Native(2, in_place=True)]
    caches = [Fed(attributes, tokens, 68, run) for run in runs]
    for columns in calls:
        first, *others = [cache.call(columns) for cache in caches]
        for cache, y in zip(caches[1:], others, strict=True):
            assert np.array_equal(first, y)
            assert_same_state(caches[0].state, cache.state)


@pytest.mark.parametrize(("storage", "policies"), FEW_OF_BOTH)
def test_pages_that_are_shared_out(instructions: str, storage: str, policies: list[int]) -> None:
    # a part has 2048 tokens; retrieval reads more than that, and leaves pages out
    attributes = attributes_of(storage=storage, policies=policies, sinks=17, recent=1100, budget=65, recent_pages=1)
    tokens = tokens_of(attributes, 2303, group=2, head_size=16, sink_logits=True)
    seen = Fed(attributes, tokens, 150, Native())
    seen.call(2300)
    bounded = Bounded()
    wanted = Fed(attributes, tokens, 150, bounded)
    wanted.state, wanted.past, wanted.column = dict(seen.state), seen.past, seen.column
    for columns in (1, 2):
        expected, y = wanted.call(columns), seen.call(columns)
        assert (np.abs(expected - y) <= bounded.most).all()
    assert_same_state(wanted.state, seen.state)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("in_place", [True, False])
def test_queries_of_float16(storage: str, in_place: bool) -> None:
    narrow = Native(activations=np.float16, in_place=in_place)
    assert_float16_is_widened(Native(), narrow, storage=storage, policies=(1, 2), budget=1)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=any_calls(most=4, tokens=60, groups=[1, 2, 3, 4, 7, 8, 70], head_sizes=[16, 48, 128, 256]))
def test_any_shape(drawn: tuple[KVAttributes, Arrays, list[int], list[list[int]]]) -> None:
    attributes, tokens, calls, new = drawn
    compare(attributes, tokens, 16, calls, new=new)


@pytest.mark.parametrize("storage", FLOATS)
@pytest.mark.parametrize("policies", [[0], [1]])
def test_floats_have_wider_heads(instructions: str, storage: str, policies: list[int]) -> None:
    attributes = attributes_of(storage=storage, policies=policies, sinks=2, recent=20)
    compare(attributes, tokens_of(attributes, 60, head_size=512), 4, (40, 1, 19))


@pytest.mark.parametrize("storage", STORAGES)
def test_no_rows_and_no_tokens(instructions: str, storage: str) -> None:
    attributes = attributes_of(storage=storage, policies=[1, 2])
    compare(attributes, tokens_of(attributes, 3, batch=0), 2, (3, 0))
    compare(attributes, tokens_of(attributes, 0, batch=2), 0, (0,))


@pytest.mark.parametrize(
    ("storage", "name", "bad", "policies"),
    pairwise(STORAGES, ["key", "value"], [np.nan, np.inf, -np.inf], [[0], [1]]),
)
def test_what_is_not_finite_reaches_those_that_read_it(
    instructions: str, storage: str, name: str, bad: float, policies: list[int]
) -> None:
    attributes = attributes_of(storage=storage, policies=policies, sinks=2, recent=4, kv_heads=1)
    tokens = tokens_of(attributes, 60, head_size=32)
    tokens[name][0, 20, 3] = bad
    bounded = Bounded()
    wanted, found = Fed(attributes, tokens, 4, bounded), Fed(attributes, tokens, 4, Native())
    for columns in (25, 5, 10, 20):
        expected, y = wanted.call(columns), found.call(columns)
        assert_same_state(wanted.state, found.state)
        assert np.array_equal(np.isfinite(expected), np.isfinite(y))
        finite = np.isfinite(bounded.most)
        assert (np.abs(expected - y)[finite] <= bounded.most[finite]).all()


def inputs_of(attributes: KVAttributes, **others: Any) -> dict[str, np.ndarray]:
    """Inputs that fit, of 2 rows with 3 columns in 2 pages, but for ``others``."""
    tokens = tokens_of(attributes, 3, batch=2)
    arrays = {
        **tokens,
        "past": np.array([5, 0]),
        "new": np.array([3, 1]),
        **attributes.state(2, 2, 16).zeros(),
        **others,
    }
    return {name: arrays[name] for name in (*INPUTS, *STATE)}


REFUSED = [
    ({"past": np.array([-1, 0])}, "past must be 0 or more"),
    ({"past": np.array([30, 0])}, "its 2 pages hold 32: give it more pages"),
    ({"past": np.array([2**63 - 1, 0])}, "at most 2\\^62"),
    ({"past": np.array([0])}, r"past must have the shape \[2\]; it is \[1\]"),
    ({"new": np.array([4, 0])}, "new from 0 to 3"),
    ({"new": np.array([-1, 0])}, "new from 0 to 3"),
    ({"new": np.array([[1, 1]])[0, :1]}, r"new must have the shape \[2\]"),
    ({"query": np.zeros((2, 3, 33), np.float32)}, "query must have the shape"),
    ({"query": np.zeros((2, 3, 0), np.float32)}, "query must have the shape"),
    ({"query": np.zeros((2, 2, 64), np.float32)}, "query must have the shape"),
    ({"key": np.zeros((2, 3, 31), np.float32)}, "key must have the shape"),
    ({"key": np.zeros((2, 3, 0), np.float32)}, "key must have the shape"),
    ({"key": np.zeros((2, 3, 1024), np.float32)}, "key must have the shape"),
    ({"value": np.zeros((2, 3, 16), np.float32)}, "value must have the shape of key"),
    ({"sink_logits": np.zeros(3, np.float32)}, r"sink_logits must have the shape \[4\] or \[0\]"),
    ({"sink_query": np.zeros((2, 3, 32), np.float32)}, "sink_query must have the shape of query"),
    ({"keys": np.zeros((2, 2, 2, 255), np.uint8)}, "keys must have the shape"),
    ({"values": np.zeros((2, 2, 1, 256), np.uint8)}, "values must have the shape"),
    ({"scales": np.zeros((2, 2, 2, 63), np.float16)}, "scales must have the shape"),
    ({"recent": np.zeros((2, 2, 2, 512), np.float32)}, "recent must have the shape"),
    ({"summaries": np.zeros((2, 2, 2, 16), np.float32)}, "summaries must have the shape"),
]


def assert_refused(others: dict[str, np.ndarray], message: str) -> None:
    attributes = attributes_of(storage="int8", policies=[2], recent_pages=0)
    inputs = inputs_of(attributes, **others)
    with pytest.raises(Exception, match=message) as caught:
        Native()(*inputs.values(), **attributes.for_node())
    assert "INVALID_ARGUMENT" in str(caught.value)
    assert f"ai.graphopt node '{NODE}'" in str(caught.value)


@pytest.mark.parametrize(("others", "message"), REFUSED)
def test_inputs_that_do_not_fit_are_refused(others: dict[str, np.ndarray], message: str) -> None:
    assert_refused(others, message)


def test_each_query_head_has_a_slope() -> None:
    attributes = attributes_of(slopes=[0.5] * 3)
    with pytest.raises(Exception, match="slopes must be a float for each of 4 query heads; there are 3"):
        Native()(*inputs_of(attributes).values(), **attributes.for_node())


def test_inputs_that_fit_are_taken() -> None:
    attributes = attributes_of(storage="int8", policies=[2], recent_pages=0)
    y, *_ = Native()(*inputs_of(attributes).values(), **attributes.for_node())
    assert np.isfinite(y).all()


@pytest.mark.parametrize("name", ["scales", "recent", "summaries"])
def test_unused_states_have_any_shape_without_numbers(name: str) -> None:
    attributes = attributes_of()
    dtype = inputs_of(attributes)[name].dtype
    y, *state = Native()(
        *inputs_of(attributes, **{name: np.zeros((0, 0, 0, 0), dtype)}).values(), **attributes.for_node()
    )
    assert np.isfinite(y).all()
    assert state[STATE.index(name)].shape == (0, 0, 0, 0)
    with pytest.raises(Exception, match=f"{name} must have 4 axes and no numbers, as it is not used"):
        Native()(*inputs_of(attributes, **{name: np.zeros((2, 2, 2, 4), dtype)}).values(), **attributes.for_node())


def test_a_cache_that_is_too_small_to_wrap() -> None:
    small = attributes_of(policies=[1], recent=10, sinks=1)  # sinks leave one page to use again
    inputs = inputs_of(small, past=np.array([30, 0]))
    with pytest.raises(Exception, match=r"its 2 pages hold 32.*besides them 29 tokens"):
        Native()(*inputs.values(), **small.for_node())
    fits = attributes_of(policies=[1], recent=10)
    y, *_ = Native()(*inputs.values(), **fits.for_node())
    assert np.isfinite(y).all()


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"kv_heads": 0}, "kv_heads must be from 1"),
        ({"page": 24}, "page must be 16, 32, 64 or 128, it is 24"),
        ({"storage": "int5"}, "float8, int8, int4, int6, int3, int2, int1, not 'int5'"),
        ({"storage": "int4", "clip": 0.0}, "clip must be above 0 and at most 1, and 1 for floats; it is 0 for int4"),
        ({"storage": "int4", "clip": float("nan")}, "clip must be above 0 and at most 1"),
        ({"clip": 0.5}, "and 1 for floats; it is 0.5 for float32"),
        (
            {"storage": "int4", "value_clip": 1.5},
            "value_clip must be above 0 and at most 1, and 1 for floats; it is 1.5 for int4",
        ),
        ({"storage": "int4", "token_factors": 2}, "token_factors must be 0 or 1, and 0 for floats; it is 2 for int4"),
        ({"token_factors": 1}, "token_factors must be 0 or 1, and 0 for floats; it is 1 for float32"),
        ({"storage": "int3"}, "a page of int3 must have a multiple of 32 tokens, it has 16"),
        ({"summary": "median"}, "summary must be bounds or mean, not 'median'"),
        ({"scale": float("nan")}, "scale and softcap must be finite"),
        ({"softcap": -1.0}, "softcap not below 0"),
        ({"window": -1}, "window must be from 0"),
        ({"sinks": -1}, "sinks must be from 0"),
        ({"recent": 0}, "recent must be from 1"),
        ({"budget": -1}, "budget must be from 0"),
        ({"channels": -1}, "channels must be from 0"),
        ({"compensate": 2}, "compensate must be from 0 to 1, it is 2"),
        ({"compensate": 1, "window": 7}, "with a window of the model's own, 7"),
        ({"slopes": [float("nan")] * 4}, "slopes must be finite, that of head 0 is not"),
        ({"slopes": [0.5] * 4, "softcap": 2.0}, "with slopes its attribute softcap must be 0"),
        ({"slopes": [0.5] * 4, "policies": [2]}, "policies dense or streaming"),
        ({"chunks": 1}, "chunks must be 0, or 1 with a window above 0; they are 1 and 0"),
        ({"chunks": 2, "window": 7}, "they are 2 and 7"),
        ({"mass": -0.5}, "mass must be a share from 0 to 1, it is -0.5"),
        ({"mass": float("nan")}, "mass must be a share from 0 to 1, it is nan"),
        ({"mass": 1}, "mass is of another type"),
        ({"channels": 1.0}, "channels is of another type"),
        ({"sink_pages": -1}, "sink_pages must be from 0"),
        ({"recent_pages": 2**40}, "recent_pages must be from 0"),
        ({"policies": [0, 1, 2]}, "policies must be 1 integer, or 2, one for each KV head"),
        (
            {"policies": [4]},
            r"the kernels know the policies 0 to 3 \(dense, streaming, retrieval, sparse_prefill\), not 4",
        ),
    ],
)
def test_attributes_out_of_range_are_refused(others: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        Native().session({**attributes_of().for_node(), **others})
    assert f"ai.graphopt node '{NODE}'" in str(caught.value)


def test_the_longest_sequences_do_not_overflow() -> None:
    huge = 2**63 - 1
    for compensate in (0, 1):
        attributes = attributes_of(policies=[1], recent=20, sinks=3, compensate=compensate)
        tokens = tokens_of(attributes, 2, batch=1)
        found = Fed(attributes, tokens, 6, Native())
        found.past = np.array([2**62 - 40])
        found.call(2)
    for others in ({"window": huge}, {"recent": huge}, {"sinks": huge}, {"budget": huge}, {"channels": huge}):
        attributes = attributes_of(policies=[1, 2], **{"compensate": "window" not in others, **others})
        compare(attributes, tokens_of(attributes, 40), 3, (39, 1))
