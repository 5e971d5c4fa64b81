"""The state of ``KVAttention`` after many calls, written page by page in the operator's own layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.kv_attention.spec.attributes import RETRIEVAL, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.layout import (
    factors_of_tokens,
    pack_keys,
    pack_values,
    round_page,
    unpack_keys,
    unpack_values,
)
from graphopt.runtime_ops.kv_attention.spec.readings import read_mask
from tools.bench.parts.attention_problem import AttentionProblem, Sequence, Singles, in_threads, runs
from tools.bench.parts.attention_reference import Chunk, Doubles, attend
from tools.bench.parts.problem import Array

State = dict[str, Array]
Integers = npt.NDArray[np.int64]

_PAGES = 16
"""Pages that are written or read at a time, few enough for a cache of the processor."""


def fill(attrs: KVAttributes, sequence: Sequence, context: int, pages: int, threads: int) -> State:
    """Return keys, values, scales and recent with the first ``context`` tokens of ``sequence``; no summaries.

    Args:
        attrs: of the node.
        sequence: where keys and values come from.
        context: tokens.
        pages: P, the capacity; where the tokens take more, the state has wrapped around.
        threads: to write with.
    """
    state = attrs.state(1, pages, sequence.size).zeros()
    held_pages = stored_pages(attrs, context, pages)

    def write(head: int) -> None:
        for logical in runs(held_pages, _PAGES):
            first, end = int(logical[0]) * attrs.page, (int(logical[-1]) + 1) * attrs.page
            shape = (len(logical), attrs.page, sequence.size)
            keys, values = (array.reshape(shape) for array in sequence.read_tokens(head, first, end))
            _write(attrs, state, head, context, logical, keys, values)

    in_threads(write, sequence.kv_heads, threads)
    del state["summaries"]
    return state


def forget(attrs: KVAttributes, state: State, past: int, context: int, size: int) -> None:
    """Overwrite what is stored of the tokens from ``past`` on, which all lie in the newest page, with zeros."""
    page = (context - 1) // attrs.page
    offsets = slice(past - page * attrs.page, attrs.page)
    if attrs.levels is not None:
        recent = state["recent"][:, :, int(attrs.slot(page))].reshape(1, attrs.kv_heads, 2, attrs.page, size)
        recent[..., offsets, :] = 0
        return
    physical = int(attrs.physical_page(page, state["keys"].shape[2]))
    for name, pack, unpack in (("keys", pack_keys, unpack_keys), ("values", pack_values, unpack_values)):
        content = unpack(state[name][0, :, physical], attrs.page, size, attrs.storage).copy()
        content[:, offsets] = 0
        state[name][0, :, physical] = pack(content, attrs.storage)


def summarize(summary: str, page: int, sequence: Sequence, tokens: int, pages: int, threads: int) -> Singles:
    """Return the summaries of the first ``tokens`` tokens, float32 [1, Hk, pages, Z]."""
    attrs = KVAttributes(kv_heads=sequence.kv_heads, scale=1.0, page=page, policies=(RETRIEVAL,), summary=summary)
    summaries: Singles = attrs.state(1, pages, sequence.size).summaries.zeros()

    def write(head: int) -> None:
        for logical in runs(np.arange(-(-tokens // page)), _PAGES):
            first, end = int(logical[0]) * page, min(tokens, (int(logical[-1]) + 1) * page)
            keys, _ = sequence.read_tokens(head, first, end)
            starts = np.arange(0, len(keys), page)
            if summary == "bounds":
                low, high = np.minimum.reduceat(keys, starts), np.maximum.reduceat(keys, starts)
                summaries[0, head, logical] = np.concatenate([low, high], axis=1)
            else:
                counts = np.diff(starts, append=len(keys))[:, None].astype(np.float32)
                summaries[0, head, logical] = np.add.reduceat(keys, starts) / counts

    in_threads(write, sequence.kv_heads, threads)
    return summaries


def stored_pages(attrs: KVAttributes, context: int, pages: int) -> Integers:
    """Return the pages of the sequence that the state holds."""
    page, newest = np.arange(-(-context // attrs.page)), (context - 1) // attrs.page
    first = attrs.first_pages
    held_pages: Integers = page[(page < first) | (page > newest - (pages - first))]
    return held_pages


def masks(attrs: KVAttributes, state: State, problem: AttentionProblem) -> list[npt.NDArray[np.bool_]]:
    """Return for each KV head which of the stored tokens each query reads, [S, n]."""
    case = problem.case
    positions = _positions(attrs, case.context, state["keys"].shape[2])
    queries = problem.query.reshape(case.tokens, case.kv_heads, -1, case.size).astype(np.float64)
    query_positions = np.arange(case.past, case.context)
    return [
        read_mask(attrs, head, state["summaries"][0], queries[:, head], query_positions, positions)
        for head in range(case.kv_heads)
    ]


def reference(
    attrs: KVAttributes, state: State, problem: AttentionProblem, masks: list[npt.NDArray[np.bool_]]
) -> Doubles:
    """Return y from the state in float64, [S, Hq, D], where queries read the tokens of their masks."""
    case = problem.case
    positions = _positions(attrs, case.context, state["keys"].shape[2])

    def chunks(head: int) -> Iterator[Chunk]:
        is_read = masks[head].any(axis=0)
        for logical in runs(np.unique(positions[is_read] // attrs.page), _PAGES):
            first, end = np.searchsorted(positions, [logical[0] * attrs.page, (logical[-1] + 1) * attrs.page])
            K, V = _decode(attrs, state, head, case.context, logical, case.size)
            yield K[: end - first], V[: end - first], masks[head][:, first:end]

    return attend(problem.query, case.kv_heads, attrs.scale, chunks)


def bytes_read(attrs: KVAttributes, state: State, problem: AttentionProblem, masks: list[npt.NDArray[np.bool_]]) -> int:
    """Return the bytes of the state that a step must read: whole pages with their scales, and summaries of pages."""
    case = problem.case
    pages = state["keys"].shape[2]
    positions = _positions(attrs, case.context, pages)
    size = 0
    for head, is_read in enumerate(masks):
        logical = np.unique(positions[is_read.any(axis=0)] // attrs.page)
        is_float = _is_float(attrs, logical, case.context)
        code_bytes = sum(state[name][0, head, 0].nbytes for name in ("keys", "values", "scales"))
        size += int((~is_float).sum()) * code_bytes
        if attrs.levels is not None:
            size += int(is_float.sum()) * state["recent"][0, head, 0].nbytes
        if attrs.policy(head) == RETRIEVAL:
            size += -(-case.context // attrs.page) * state["summaries"][0, head, 0].nbytes
    return size


def decode(attrs: KVAttributes, state: State, head: int, context: int, size: int) -> tuple[Array, Array]:
    """Return the decoded keys and values of all stored tokens of a KV head, [n, D] each."""
    pages = stored_pages(attrs, context, state["keys"].shape[2])
    K, V = _decode(attrs, state, head, context, pages, size)
    count = len(_positions(attrs, context, state["keys"].shape[2]))
    return K[:count], V[:count]


def _positions(attrs: KVAttributes, context: int, pages: int) -> Integers:
    positions = (stored_pages(attrs, context, pages)[:, None] * attrs.page + np.arange(attrs.page)).reshape(-1)
    return positions[positions < context]


def _is_float(attrs: KVAttributes, logical: Integers, context: int) -> npt.NDArray[np.bool_]:
    """Return which pages are read from `recent`."""
    if attrs.levels is None:
        return np.zeros(logical.shape, np.bool_)
    return attrs.is_recent(logical, context)


def _write(
    attrs: KVAttributes, state: State, head: int, context: int, logical: Integers, keys: Singles, values: Singles
) -> None:
    """Store whole pages, keys and values [n, T, D]; those that are still floats have no codes."""
    physical = attrs.physical_page(logical, state["keys"].shape[2])
    if attrs.levels is None:
        state["keys"][0, head, physical] = pack_keys(keys, attrs.storage)
        state["values"][0, head, physical] = pack_values(values, attrs.storage)
        return
    factors = factors_of_tokens(keys) if attrs.token_factors else np.ones((*keys.shape[:2], 1), np.float32)
    key_codes, key_low, key_step = round_page(np.divide(keys, factors, dtype=np.float32), -2, attrs.levels)
    value_codes, value_low, value_step = round_page(values, -1, attrs.levels)
    state["keys"][0, head, physical] = pack_keys(key_codes, attrs.storage)
    state["values"][0, head, physical] = pack_values(value_codes, attrs.storage)
    scales = np.concatenate([key_low, key_step, value_low, value_step, factors.squeeze(-1)], axis=-1)
    state["scales"][0, head, physical] = scales[:, : attrs.scale_numbers(keys.shape[-1])]
    for index in np.flatnonzero(_is_float(attrs, logical, context)):
        pair = np.concatenate([keys[index].reshape(-1), values[index].reshape(-1)])
        state["recent"][0, head, int(attrs.slot(logical[index]))] = pair
        for name in ("keys", "values", "scales"):
            state[name][0, head, physical[index]] = 0


def _decode(
    attrs: KVAttributes, state: State, head: int, context: int, logical: Integers, size: int
) -> tuple[Array, Array]:
    """Return the decoded keys and values of whole pages, [n T, D] each."""
    physical = attrs.physical_page(logical, state["keys"].shape[2])
    K: Any = unpack_keys(state["keys"][0, head, physical], attrs.page, size, attrs.storage)
    V: Any = unpack_values(state["values"][0, head, physical], attrs.page, size, attrs.storage)
    if attrs.levels is not None:
        scales = state["scales"][0, head, physical].astype(np.float64)
        K = scales[:, None, :size] + scales[:, None, size : 2 * size] * K
        by_token = scales[:, 2 * size :].reshape(len(logical), 2 + attrs.token_factors, attrs.page, 1)
        K = K * by_token[:, 2] if attrs.token_factors else K
        V = by_token[:, 0] + by_token[:, 1] * V
        for index in np.flatnonzero(_is_float(attrs, logical, context)):
            slot = state["recent"][0, head, int(attrs.slot(logical[index]))]
            K[index], V[index] = slot.reshape(2, attrs.page, size)
    return K.reshape(-1, size), V.reshape(-1, size)
