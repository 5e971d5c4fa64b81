"""Attention in float64, from a cache as an engine holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from tools.bench.parts.problem import Array

Doubles = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

Chunk = tuple[Array, Array, Mask]
"""Keys and values [n, D] of some tokens of a KV head, and which queries read them, [S, n]."""

_TOKENS = 1 << 12
"""Tokens that are in float64 at a time."""


def attend(query: Array, kv_heads: int, scale: float, read_chunks: Callable[[int], Iterator[Chunk]]) -> Doubles:
    """Return attention of each query over the tokens that it reads.

    Args:
        query: [S, Hq, D].
        kv_heads: Hk; query heads come in groups of Hq / Hk that share a KV head.
        scale: of scores.
        read_chunks: yields the tokens that the queries of a KV head read, chunk by chunk.

    Returns:
        float64 [S, Hq, D].
    """
    tokens, heads, size = query.shape
    group = heads // kv_heads
    y = np.zeros((tokens, kv_heads, group, size))
    for head in range(kv_heads):
        q = query[:, head * group : (head + 1) * group].astype(np.float64) * scale
        largest = np.full((tokens, group, 1), -np.inf)
        total = np.zeros((tokens, group, 1))
        for K, V, mask in read_chunks(head):
            scores = np.where(mask[:, None], q @ K.astype(np.float64).T, -np.inf)
            maximum = np.maximum(largest, scores.max(axis=-1, keepdims=True))
            shift = np.where(np.isneginf(maximum), 0, maximum)  # nothing was read so far
            weights, shrink = np.exp(scores - shift), np.exp(largest - shift)
            y[:, head] = y[:, head] * shrink + weights @ V.astype(np.float64)
            total = total * shrink + weights.sum(axis=-1, keepdims=True)
            largest = maximum
        y[:, head] /= total
    return y.reshape(query.shape)


def attend_flat(
    query: Array, scale: float, size: int, read_tokens: Callable[[int, slice], tuple[Array, Array]], kv_heads: int
) -> Doubles:
    """Return causal attention over the ``size`` tokens of a cache, the last of which belong to the queries.

    Args:
        query: [S, Hq, D].
        scale: of scores.
        size: tokens in the cache.
        read_tokens: returns the keys and values [n, D] of a KV head at some positions.
        kv_heads: Hk.

    Returns:
        float64 [S, Hq, D].
    """
    positions = np.arange(size - len(query), size)[:, None]

    def chunks(head: int) -> Iterator[Chunk]:
        for first in range(0, size, _TOKENS):
            part = slice(first, min(size, first + _TOKENS))
            yield *read_tokens(head, part), np.arange(part.start, part.stop) <= positions

    return attend(query, kv_heads, scale, chunks)
