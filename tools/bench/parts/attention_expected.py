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


def attend(query: Array, kv_heads: int, scale: float, read: Callable[[int], Iterator[Chunk]]) -> Doubles:
    """Return the softmax of what is read times its values.

    Args:
        query: [S, Hq, D].
        kv_heads: Hk, each of which serves as many query heads one behind the other.
        scale: of scores.
        read: yields what the queries of a KV head read, in parts that are merged as they come.

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
        for K, V, mask in read(head):
            scores = np.where(mask[:, None], q @ K.astype(np.float64).T, -np.inf)
            above = np.maximum(largest, scores.max(axis=-1, keepdims=True))
            known = np.where(np.isneginf(above), 0, above)  # nothing was read so far
            weights, shrink = np.exp(scores - known), np.exp(largest - known)
            y[:, head] = y[:, head] * shrink + weights @ V.astype(np.float64)
            total = total * shrink + weights.sum(axis=-1, keepdims=True)
            largest = above
        y[:, head] /= total
    return y.reshape(query.shape)


def attend_flat(
    query: Array, scale: float, size: int, read: Callable[[int, slice], tuple[Array, Array]], kv_heads: int
) -> Doubles:
    """Return causal attention over the ``size`` tokens of a cache, the last of which belong to the queries.

    Args:
        query: [S, Hq, D].
        scale: of scores.
        size: tokens in the cache.
        read: returns the keys and values [n, D] of a KV head at some positions.
        kv_heads: Hk.

    Returns:
        float64 [S, Hq, D].
    """
    asked = np.arange(size - len(query), size)[:, None]

    def chunks(head: int) -> Iterator[Chunk]:
        for first in range(0, size, _TOKENS):
            part = slice(first, min(size, first + _TOKENS))
            yield *read(head, part), np.arange(part.start, part.stop) <= asked

    return attend(query, kv_heads, scale, chunks)
