"""Prompts that blocks of queries read in part: the definition by hand, and kernels beside the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphopt.runtime_ops.kv_attention.spec.attributes import STORAGES, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.policies.sparse_prefill import SparsePrefill
from tests.native import needs_library
from tests.runtime_ops.kv_cases import Arrays, Bounded, Fed, attributes_of, tokens_of
from tests.runtime_ops.kv_native import Native

# sums of float64 in another order
SAME = 1e-12

BLOCKS: dict[str, Any] = {"policies": (3,), "query_block": 12, "query_stride": 4, "prefill_mass": 0.8}


def attend(query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float, read: np.ndarray) -> np.ndarray:
    """Attention of queries [G, D] to the tokens of a mask."""
    scores = scale * query @ key[read].T
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights @ value[read] / weights.sum(axis=1, keepdims=True)


def by_hand(kv: KVAttributes, tokens: Arrays, calls: list[int]) -> np.ndarray:
    """What is read by the words of the operator: float64 [S, H, G, D] of row 0, of floats without sinks of a model."""
    size = tokens["key"].shape[2] // kv.kv_heads
    key, value = (tokens[name][0].reshape(-1, kv.kv_heads, size).astype(np.float64) for name in ("key", "value"))
    query = tokens["query"][0].reshape(len(key), kv.kv_heads, -1, size).astype(np.float64)
    y, positions = np.zeros_like(query), np.arange(len(key))
    ends = np.cumsum(calls)
    for head in range(kv.kv_heads):
        for p in positions:
            begin, call = p // kv.query_block * kv.query_block, np.searchsorted(ends, p, side="right")
            is_whole = begin >= ends[call] - calls[call] and begin + kv.query_block <= ends[call]
            seen = (positions <= p) & (positions > p - (kv.window or len(key)))
            read = seen.copy()
            if is_whole:
                weights, asked = (
                    np.zeros(len(key)),
                    range(begin + kv.query_stride - 1, begin + kv.query_block, kv.query_stride),
                )
                for q in asked:
                    sees = (positions <= q) & (positions > q - (kv.window or len(key)))
                    scores = np.exp(kv.scale * query[q, head] @ key[:, head].T) * sees
                    others = (positions >= kv.sinks) & (positions <= q - kv.recent)
                    weights += (scores / scores.sum(axis=1, keepdims=True) * others).sum(axis=0)
                of_pages = {page: weights[positions // kv.page == page].sum() for page in set(positions // kv.page)}
                left, total = set(), 0.0
                for page in sorted(of_pages, key=lambda page: (of_pages[page], -page)):
                    total += of_pages[page]
                    if total >= (1 - kv.prefill_mass) * len(asked) * query.shape[2]:
                        break
                    left.add(page)
                always = (positions < kv.sinks) | (positions > p - kv.recent)
                read &= always | ~np.isin(positions // kv.page, list(left))
            y[p, head] = attend(query[p, head], key[:, head], value[:, head], kv.scale, read)
    return y


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("calls", [(90,), (12, 48, 30), (7, 1, 60, 22)])
def test_the_definition(window: int, calls: tuple[int, ...]) -> None:
    kv = attributes_of(sinks=3, recent=9, window=window, scale=1.0, **BLOCKS)
    tokens = tokens_of(kv, 90, group=3)
    y = Fed(kv, tokens, 6).calls(*calls)[0].reshape(90, 2, 3, -1)
    assert np.abs(y - by_hand(kv, tokens, list(calls))).max() < SAME
    dense = Fed(attributes_of(window=window, scale=1.0), tokens, 6).calls(90)[0].reshape(y.shape)
    assert np.abs(y - dense).max() > 1e-3  # something was left out


def test_calls_of_whole_blocks_are_one_call() -> None:
    kv = attributes_of(recent=9, **BLOCKS)
    tokens = tokens_of(kv, 84)
    assert np.abs(Fed(kv, tokens, 6).calls(84) - Fed(kv, tokens, 6).calls(24, 12, 48)).max() < SAME


def test_what_is_no_whole_block_and_all_of_the_mass_are_dense() -> None:
    tokens = tokens_of(attributes_of(), 70)
    dense = Fed(attributes_of(), tokens, 5).calls(70)
    short = attributes_of(**BLOCKS)
    assert np.abs(Fed(short, tokens, 5).calls(*[5] * 14) - dense).max() < SAME
    whole = attributes_of(**{**BLOCKS, "prefill_mass": 1.0})
    assert np.array_equal(Fed(whole, tokens, 5).calls(70), dense)


@pytest.mark.parametrize(("block", "stride"), [(12, 5), (12, 0)])
def test_a_block_is_a_multiple_of_its_stride(block: int, stride: int) -> None:
    with pytest.raises(ValueError, match="query_block is a multiple of query_stride"):
        attributes_of(**{**BLOCKS, "query_block": block, "query_stride": stride})
    SparsePrefill(query_block=0, query_stride=5).check()


def compare(kv: KVAttributes, tokens: Arrays, pages: int, calls: list[int], run: Native) -> float:
    """Feed reference and kernel alike; return the share of queries whose pages rounding cannot change."""
    bounded, firm = Bounded(), []
    wanted, found = Fed(kv, tokens, pages, bounded), Fed(kv, tokens, pages, run)
    for columns in calls:
        expected, y = wanted.call(columns), found.call(columns)
        assert (np.abs(expected - y) <= bounded.most).all()
        firm.append(np.isfinite(bounded.most).mean())
    return float(np.mean(firm))


# what blocks read is the same whatever pages are stored as: each storage has one of these, and each of these has three
OTHERS: tuple[dict[str, Any], ...] = (
    {"sinks": 5, "recent": 30, "page": 16},
    {"window": 100, "softcap": 4.0, "page": 32},
    {"policies": (3, 1), "sinks": 18, "recent": 20, "sink_pages": 1, "recent_pages": 1},
)


@needs_library
@pytest.mark.parametrize(
    ("storage", "others"), [(storage, OTHERS[index % len(OTHERS)]) for index, storage in enumerate(STORAGES)]
)
def test_kernels(instructions: str, storage: str, others: dict[str, Any]) -> None:
    kv = attributes_of(storage=storage, scale=0.6, **{**BLOCKS, "query_block": 32, "query_stride": 8, **others})
    tokens = tokens_of(kv, 300, group=3, head_size=32, sink_logits=True, sink_query=True)
    firm = compare(kv, tokens, -(-300 // kv.page), [7, 250, 1, 42], Native(threads=2))
    assert firm > 0.8


@needs_library
def test_lists_of_several_runs(instructions: str) -> None:
    """More than 2048 tokens in a list, which tasks share; with one task for each block of many, too.

    The reference reads the last blocks only, since calls of whole blocks are one call: all 2700 queries take it 24 s.
    """
    kv = attributes_of(scale=0.2, kv_heads=1, page=64, **{**BLOCKS, "query_block": 64, "query_stride": 16})
    tokens = tokens_of(kv, 2700, group=2)
    found, bounded, firm = Fed(kv, tokens, 43, Native(threads=2)), Bounded(), []
    wanted = Fed(kv, tokens, 43, Native(threads=2))
    wanted.call(2496)
    wanted.run = bounded
    for columns, last in ((2560, 64), (140, 140)):
        y, expected = found.call(columns)[:, -last:], wanted.call(last)
        assert (np.abs(expected - y) <= bounded.most).all()
        firm.append(np.isfinite(bounded.most).mean())
    assert np.mean(firm) > 0.7


@needs_library
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nothing_is_left_out_where_a_number_is_not_finite(instructions: str, bad: float) -> None:
    kv = attributes_of(scale=1.0, kv_heads=1, **BLOCKS)
    tokens = tokens_of(kv, 72)
    tokens["key"][0, 50, 3] = bad
    for y in (Fed(kv, tokens, 5).call(72), Fed(kv, tokens, 5, Native()).call(72)):
        assert np.isnan(y[0, 60:]).all()
        assert np.isfinite(y[0, :50]).all()
