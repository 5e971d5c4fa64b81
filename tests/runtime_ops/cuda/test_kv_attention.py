"""KVAttention's CUDA kernels against the frozen vectors, the reference and its bound."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphopt.runtime_ops.kv_attention.spec.attributes import RETRIEVAL, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.policies.sparse_prefill import SparsePrefill
from graphopt.runtime_ops.kv_attention.spec.reference import reference
from tests.runtime_ops.cuda.kv_attention import Kernels
from tests.runtime_ops.kv_attention.bound import bound
from tests.runtime_ops.kv_attention.test_kernel import POLICIES, SELECTIONS, SOME, Bounded, compare
from tests.runtime_ops.kv_attention.test_vectors import fed, load, state_of
from tests.runtime_ops.kv_cases import (
    GPU_STORAGES,
    INPUTS,
    STATE,
    Arrays,
    Fed,
    any_calls,
    assert_same_state,
    attributes_of,
    tokens_of,
)

# GPUs refuse blocks of queries that choose pages together, see test_what_a_gpu_does_not_take_is_refused, and values of
# other bits than keys
FROZEN = [
    case
    for case in load()
    if case["attributes"]["storage"] in GPU_STORAGES
    and SparsePrefill.number not in case["attributes"]["policies"]
    and "value_storage" not in case["attributes"]
]


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda frozen: frozen.get("name", frozen["attributes"]["storage"]))
def test_frozen_vectors(kernels: ctypes.CDLL, frozen: dict[str, Any]) -> None:
    cache, bounded = fed(frozen, Kernels(kernels)), Bounded()
    for columns in frozen["calls"][:-1]:
        cache.call(columns)
    wanted = fed(frozen, bounded)
    wanted.state, wanted.past, wanted.column = dict(cache.state), cache.past, cache.column
    wanted.call(frozen["calls"][-1])
    assert (np.abs(cache.call(frozen["calls"][-1]) - np.array(frozen["y"])[None]) <= bounded.most).all()
    is_mean = cache.attributes.summary == "mean" or cache.attributes.compensate
    for name, tensor in state_of(frozen, cache.state).items():
        slack = 1e-6 if name == "summaries" and is_mean else 0  # the last bits of a running mean are free
        stored, expected = (each.astype(np.float64) for each in (cache.state[name], tensor))
        assert np.abs(stored - expected).max(initial=0) <= slack, name


@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize("storage", GPU_STORAGES)
def test_the_kernels_are_the_reference(kernels: ctypes.CDLL, storage: str, policies: list[int]) -> None:
    for group, size, page, calls in ((3, 32, 16, (33, 1, 1, 18)), (1, 80, 64, (70, 2))):
        attributes = attributes_of(storage=storage, policies=policies, page=page, **SOME)
        tokens = tokens_of(attributes, sum(calls), group=group, head_size=size, sink_logits=True, sink_query=group == 3)
        compare(attributes, tokens, 5, calls, run=Kernels(kernels))


@pytest.mark.parametrize(
    ("others", "storage"),
    [(others, GPU_STORAGES[index % len(GPU_STORAGES)]) for index, others in enumerate(SELECTIONS)],
)
def test_what_is_chosen_and_what_stands_for_the_rest(
    kernels: ctypes.CDLL, storage: str, others: dict[str, Any]
) -> None:
    attributes = attributes_of(storage=storage, **{"sinks": 5, "recent": 9, "recent_pages": 1, **others})
    for group, size, calls in ((2, 16, (60, 1)), (9, 48, (50, 1))):
        tokens = tokens_of(attributes, sum(calls), group=group, head_size=size, sink_logits=True)
        compare(attributes, tokens, 4, calls, run=Kernels(kernels))


@pytest.mark.parametrize("storage", GPU_STORAGES)
def test_a_cache_that_wraps(kernels: ctypes.CDLL, storage: str) -> None:
    for sinks, compensate in ((20, 0), (20, 1), (0, 1)):
        attributes = attributes_of(
            storage=storage, policies=[1], sinks=sinks, recent=20, recent_pages=1, compensate=compensate
        )
        calls = (30, 30, 1, 1, 30, 16, 40)
        compare(attributes, tokens_of(attributes, sum(calls)), 9, calls, run=Kernels(kernels))


@pytest.mark.parametrize("storage", GPU_STORAGES)
def test_windows_softcaps_and_rows_of_different_lengths(kernels: ctypes.CDLL, storage: str) -> None:
    attributes = attributes_of(
        storage=storage,
        policies=[GPU_STORAGES.index(storage) % 3, 2],
        window=20,
        softcap=3.0,
        sinks=5,
        recent=30,
        budget=1,
        chunks=GPU_STORAGES.index(storage) % 2,
    )
    new = ((30, 7, 0), (0, 0, 0), (0, 2, 1), (1, 20, 2))
    results = compare(attributes, tokens_of(attributes, 56, batch=3), 5, (30, 4, 2, 20), new=new, run=Kernels(kernels))
    for y, of_rows in zip(results, new, strict=True):
        for row, count in enumerate(of_rows):
            assert not y[row, : y.shape[1] - count].any(), "padding is 0"


def drawn(attributes: KVAttributes, past: list[int], columns: int, pages: int, **others: Any) -> list[np.ndarray]:
    """Return the inputs of a call on a cache of ``past`` tokens in each row, whose state is drawn, not fed."""
    random, tokens = np.random.default_rng(3), tokens_of(attributes, columns, batch=len(past), **others)
    size = tokens["key"].shape[2] // attributes.kv_heads
    state: Arrays = {}
    for name, tensor in attributes.state(len(past), pages, size):
        like = tensor.zeros()
        numbers = random.integers(0, 256, like.shape) if like.dtype == np.uint8 else random.standard_normal(like.shape)
        state[name] = numbers.astype(like.dtype)
    if attributes.retrieves and attributes.summary == "bounds":
        bounds = state["summaries"][..., : 2 * size]
        bounds[...] = np.sort(bounds.reshape(*bounds.shape[:3], 2, size), axis=3).reshape(bounds.shape)
    arrays = {**tokens, **state, "past": np.array(past), "new": np.full(len(past), columns)}
    return [arrays[name] for name in (*INPUTS, *STATE)]


def check(run: Kernels, inputs: list[np.ndarray], attributes: KVAttributes) -> np.ndarray:
    """Compare with the reference, and return y."""
    expected, limit = reference(*inputs, **attributes.for_node())[0], bound(*inputs, **attributes.for_node())
    y: np.ndarray = run(*inputs, **attributes.for_node())[0]
    assert (np.abs(y - expected) <= limit).all()
    return y


@pytest.mark.parametrize("storage", GPU_STORAGES)
def test_pages_that_are_shared_out(kernels: ctypes.CDLL, storage: str) -> None:
    # 256 tokens are the least that a part has: rows of 3 parts, of 1, and streaming heads of fewer pages
    attributes = attributes_of(
        storage=storage, policies=[0, 1, 2], kv_heads=3, sinks=17, recent=300, budget=30, page=16, recent_pages=1
    )
    inputs = drawn(attributes, [701, 20], 2, 50, group=9, sink_logits=True)
    y = check(Kernels(kernels), inputs, attributes)
    for seed in (1, 2):  # threads in any other order give the same bits
        assert np.array_equal(Kernels(kernels, seed)(*inputs, **attributes.for_node())[0], y)
    lists = Kernels(kernels, list_bytes=1)  # the pages of one token at a time
    assert np.array_equal(lists(*inputs, **attributes.for_node())[0], y)


@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("storage", ["float16", "int8", "int4"])
def test_the_pages_of_a_model(kernels: ctypes.CDLL, storage: str, page: int) -> None:
    attributes = attributes_of(
        storage=storage, policies=[0], kv_heads=1, page=page, sink_pages=1, scale=128**-0.5, sinks=70
    )
    for size, columns in ((128, 1), (256, 3)):
        inputs = drawn(attributes, [400], columns, 7, group=4, head_size=size, sink_query=True)
        check(Kernels(kernels), inputs, attributes)


def test_a_long_context(kernels: ctypes.CDLL) -> None:
    """So many pages that each block has more than one for each of its warps: then more is copied ahead."""
    attributes = attributes_of(storage="float16", policies=[0], kv_heads=121, page=64, scale=0.1)
    check(Kernels(kernels), drawn(attributes, [1060], 1, 17, group=1, head_size=128), attributes)


@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("storage", ["float16", "int8", "int4"])
def test_many_queries_of_a_head(kernels: ctypes.CDLL, storage: str, page: int) -> None:
    """More than 4 of a head of 128: a block then reads a page once for 16 of them."""
    for group, others, calls in (
        (4, {"window": 100, "softcap": 3.0}, (90, 4, 1)),
        (3, {"policies": [1], "sinks": 5, "recent": 70, "recent_pages": 2}, (150, 7)),
    ):
        attributes = attributes_of(storage=storage, kv_heads=1, page=page, scale=128**-0.5, **others)
        tokens = tokens_of(attributes, sum(calls), batch=1, group=group, head_size=128, sink_logits=True)
        compare(attributes, tokens, 4, calls, run=Kernels(kernels, seed=page))
    # pages in parts
    attributes = attributes_of(storage=storage, policies=[0], kv_heads=1, page=page, scale=2**-9)
    check(Kernels(kernels), drawn(attributes, [700], 2, 16, group=5, head_size=128), attributes)


def prompt(attributes: KVAttributes, past: list[int], new: list[int], group: int) -> list[np.ndarray]:
    """Return the inputs of prompts in float16, for heads of 128, on a cache with garbage behind the last token."""
    pages = -(-max(map(sum, zip(past, new, strict=True))) // attributes.page)
    inputs = drawn(attributes, past, max(new), pages + 1, group=group, head_size=128, sink_logits=True)
    inputs[:3] = [each.astype(np.float16).astype(np.float32) for each in inputs[:3]]
    inputs[4] = np.array(new)
    for state in inputs[7:9]:
        state[:, :, pages:].view(np.uint16)[...] = 0x7E00  # NaN
    return inputs


def prompt_bound(inputs: list[np.ndarray], attributes: KVAttributes, y: np.ndarray) -> np.ndarray:
    """Return what a prompt on sm_90a may err by: :func:`bound`, and what float16 rounds.

    A weight is 2^15 times what it is of the largest one so far, rounded to float16: by 2^-11 of itself, or by 2^-25
    where that is subnormal. Weights are divided by sums of at least 2^15, so y errs by 2^-11 sum p_j |v_j| and
    2^-40 sum |v_j| more, and by 2^-11 of itself, as it is float16.
    """
    magnitudes = list(inputs)
    magnitudes[2], magnitudes[8] = np.abs(inputs[2]), np.abs(inputs[8])
    tokens = inputs[8].shape[2] * attributes.page
    largest = max(np.nanmax(np.where(np.isfinite(each), each, 0).astype(np.float64)) for each in magnitudes[2:9:6])
    weighed = reference(*magnitudes, **attributes.for_node())[0]
    limit = bound(*inputs, **attributes.for_node())
    return limit + 2.0**-11 * (weighed + np.abs(y)) + 2.0**-40 * tokens * largest


PROMPTS: tuple[tuple[int, list[int], list[int], dict[str, Any]], ...] = (
    (4, [0], [40], {}),  # 160 queries: the second block has 32
    (3, [150, 0], [30, 33], {"policies": [1], "sinks": 5, "recent": 70, "recent_pages": 2, "compensate": 1}),
    (2, [70, 3], [64, 5], {"window": 100, "kv_heads": 2, "policies": [0, 1], "sinks": 70, "recent": 65}),
    (16, [700], [5], {}),  # pages in three parts
    (1, [10], [260], {}),  # parts that queries of the first block do not reach
)


@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize(("group", "past", "new", "others"), PROMPTS)
def test_prompts_on_sm90a(
    kernels: ctypes.CDLL, page: int, group: int, past: list[int], new: list[int], others: dict[str, Any]
) -> None:
    options = {"policies": [0], "kv_heads": 1, "scale": 128**-0.5, **others}
    attributes = attributes_of(storage="float16", page=page, **options)
    inputs = prompt(attributes, past, new, group)
    y, again = (
        Kernels(kernels, seed, np.float16, sm90a=True)(*inputs, **attributes.for_node())[0] for seed in (page, page + 1)
    )
    assert np.array_equal(y, again)
    expected = reference(*inputs, **attributes.for_node())[0]
    assert (np.abs(y - expected) <= prompt_bound(inputs, attributes, y)).all()
    if not kernels.on_gpu:  # there the kernel for 16 queries has 22 bits of a weight
        assert not np.array_equal(y, Kernels(kernels, dtype=np.float16)(*inputs, **attributes.for_node())[0])


@pytest.mark.parametrize("others", [{"softcap": 3.0}, {"scale": -0.1}, {"storage": "int8"}])
def test_what_no_kernel_for_prompts_takes(interpreted: ctypes.CDLL, others: dict[str, Any]) -> None:
    attributes = attributes_of(**{"storage": "float16", "page": 64, "kv_heads": 1, "scale": 0.1, **others})
    inputs = drawn(attributes, [3], 34, 1, group=2, head_size=128)
    on_any, on_sm90a = (
        Kernels(interpreted, dtype=np.float16, sm90a=sm90a)(*inputs, **attributes.for_node())[0]
        for sm90a in (False, True)
    )
    assert np.array_equal(on_any, on_sm90a)


@pytest.mark.parametrize(("name", "bad"), [("key", np.nan), ("key", -np.inf), ("value", np.nan), ("value", np.inf)])
def test_what_is_not_finite_in_a_prompt(kernels: ctypes.CDLL, name: str, bad: float) -> None:
    attributes = attributes_of(storage="float16", policies=[0], kv_heads=1, page=64, scale=128**-0.5)
    for token in (10, 130):  # read by all queries of the second block, and by none of the first
        inputs = prompt(attributes, [20], [140], 1)
        inputs[1 if name == "key" else 2][0, token, 3] = bad
        expected = reference(*inputs, **attributes.for_node())[0]
        y = Kernels(kernels, token, np.float16, sm90a=True)(*inputs, **attributes.for_node())[0]
        assert np.array_equal(np.isfinite(expected), np.isfinite(y))
        limit, finite = prompt_bound(inputs, attributes, y), np.isfinite(expected)
        assert (np.abs(y - expected)[finite] <= limit[finite]).all()


def test_more_rows_than_a_launch_takes(kernels: ctypes.CDLL) -> None:
    attributes = attributes_of(policies=[1, 2], recent=9, budget=1, storage="int8")
    inputs = drawn(attributes, [(7 * row) % 40 for row in range(35)], 1, 3, group=1)
    check(Kernels(kernels), inputs, attributes)


@pytest.mark.parametrize("far", [2**31, 2**53, 2**62 - 400])
def test_positions_of_a_cache_that_has_run_for_years(kernels: ctypes.CDLL, far: int) -> None:
    for storage in ("float32", "float16", "int4"):
        attributes = attributes_of(storage=storage, policies=[1], sinks=5, recent=20, recent_pages=1, compensate=1)
        inputs = drawn(attributes, [far, far + 7], 17, 9, sink_query=True)
        check(Kernels(kernels), inputs, attributes)


@pytest.mark.parametrize("mass", [0.0, 0.6])
def test_what_is_chosen_of_many_pages(kernels: ctypes.CDLL, mass: float) -> None:
    for summary, channels, scale in (("bounds", 0, 1.0), ("mean", 5, 0.25)):
        attributes = attributes_of(
            policies=[2], kv_heads=1, budget=20, mass=mass, summary=summary, channels=channels, recent=30, scale=scale
        )
        inputs = drawn(attributes, [16 * 300], 1, 310, group=9)
        check(Kernels(kernels), inputs, attributes)


def test_more_pages_than_registers_of_a_block_hold(kernels: ctypes.CDLL) -> None:
    attributes = attributes_of(policies=[2], kv_heads=1, budget=20, recent=30)
    check(Kernels(kernels), drawn(attributes, [16 * 4110], 1, 4111, group=1), attributes)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drawn=any_calls(
        most=3,
        tokens=30,
        groups=[1, 2, 3, 4, 7, 8, 10],
        head_sizes=[16, 48, 144],
        storages=GPU_STORAGES,
        has_factors=False,
        has_pairs=False,
        policies=3,
    ),
    seed=st.integers(0, 99),
)
def test_any_call(
    kernels: ctypes.CDLL, drawn: tuple[KVAttributes, Arrays, list[int], list[list[int]]], seed: int
) -> None:
    attributes, tokens, calls, new = drawn
    compare(attributes, tokens, 6, calls, new=new, run=Kernels(kernels, seed=seed))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_activations_of_16_bits(kernels: ctypes.CDLL, dtype: type) -> None:
    for storage in ("float16", "int4"):
        attributes = attributes_of(storage=storage, policies=[0, 2], recent=9, budget=1, recent_pages=1, summary="mean")
        tokens = {
            name: tensor if name == "sink_logits" else tensor.astype(dtype).astype(np.float32)
            for name, tensor in tokens_of(attributes, 50, sink_logits=True, sink_query=True).items()
        }
        bounded = Bounded()
        wanted, found = (
            Fed(attributes, tokens, 4, bounded),
            Fed(attributes, tokens, 4, Kernels(kernels, dtype=dtype)),
        )
        for columns in (40, 1, 9):
            expected, y = wanted.call(columns), found.call(columns)
            assert (
                np.abs(wanted.state["summaries"] - found.state["summaries"]).max() < 1e-6 * np.abs(tokens["key"]).max()
            )
            found.state["summaries"] = wanted.state["summaries"]
            assert_same_state(wanted.state, found.state)
            # y is rounded to nearest: by half of a unit in the last place of its 11 or 8 bits
            assert (
                np.abs(y - expected) <= bounded.most + 2.0 ** (-11 if dtype is np.float16 else -8) * np.abs(y)
            ).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("storage", GPU_STORAGES)
def test_what_is_not_finite_reaches_those_that_read_it(
    kernels: ctypes.CDLL, storage: str, name: str, bad: float
) -> None:
    # the last is read for many queries together
    for policies, size, page in (([0], 32, 16), ([1], 32, 16), ([0], 128, 64)):
        attributes = attributes_of(storage=storage, policies=policies, sinks=2, recent=4, kv_heads=1, page=page)
        tokens = tokens_of(attributes, 45, head_size=size)
        tokens[name][0, 20, 3] = bad
        bounded = Bounded()
        wanted = Fed(attributes, tokens, 4, bounded)
        found = Fed(attributes, tokens, 4, Kernels(kernels))
        for columns in (25, 5, 15):
            expected, y = wanted.call(columns), found.call(columns)
            assert_same_state(wanted.state, found.state)
            assert np.array_equal(np.isfinite(expected), np.isfinite(y))
            finite = np.isfinite(bounded.most)
            assert (np.abs(expected - y)[finite] <= bounded.most[finite]).all()


def test_no_rows_and_no_tokens(kernels: ctypes.CDLL) -> None:
    attributes = attributes_of(policies=[1, RETRIEVAL], storage="int8")
    compare(attributes, tokens_of(attributes, 3, batch=0), 2, (3, 0), run=Kernels(kernels))
    compare(attributes, tokens_of(attributes, 0, batch=2), 0, (0,), run=Kernels(kernels))


def test_what_a_gpu_does_not_take_is_refused(kernels: ctypes.CDLL) -> None:
    attributes = attributes_of(kv_heads=257, policies=[0])
    inputs = drawn(attributes, [3], 1, 1, group=1)
    with pytest.raises(RuntimeError, match="kv_heads is 257, on a GPU it must be from 1 to 256"):
        Kernels(kernels)(*inputs, **attributes.for_node())
    attributes = attributes_of(policies=[SparsePrefill.number], prefill_mass=0.9, query_block=4, query_stride=2)
    inputs = drawn(attributes, [3], 1, 1, group=1)
    with pytest.raises(RuntimeError, match="a policy is 3, whose blocks of queries choose pages together"):
        Kernels(kernels)(*inputs, **attributes.for_node())
