"""A fact planted in a long context, in keys: one needle per query, and distractors of the same norm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes
from tools.bench.parts import attention_state
from tools.bench.parts.attention_problem import Sequence, Singles
from tools.bench.parts.problem import Array

GAP = 24.0
"""Nats by which a needle's score exceeds the mean of the distractors': of dense attention over N of them, whose scores
have a standard deviation of s nats, it has 1 / (1 + N exp(s^2 / 2 - 24)): all but 1e-5 at 131072 and s = 1.2."""

_STREAM = 7


@dataclass(frozen=True)
class Needle:
    """How needles and distractors differ; the key of either is sqrt(D) times a unit vector.

    Attributes:
        cosine: of a needle and its query.
        channels: of D that queries use, the same for all queries of a head; all where this is larger.
        common: share of the squared norm of every distractor that is one vector, the same for all: real keys have
            channels that are large throughout (KIVI, Liu et al. 2024). Queries are orthogonal to it.
    """

    cosine: float = 0.9
    channels: int = 16
    common: float = 0.75

    def margin(self, size: int) -> float:
        """Return a needle's score less the mean of the distractors', in standard deviations of theirs."""
        return self.cosine * math.sqrt(size / (1 - self.common))


class Haystack(Sequence):
    """Random keys and values, among which needles lie, one for each query; a needle's value is of +1 and -1.

    Args:
        kv_heads: heads, each with needles and queries of its own.
        size: of a head, D.
        positions: where needles lie, rising.
        needle: how they differ from the rest.
        seed: what is drawn.
    """

    def __init__(
        self, kv_heads: int, size: int, positions: npt.NDArray[np.int64], needle: Needle, seed: int = 0
    ) -> None:
        super().__init__(kv_heads, size, seed)
        self.positions, self.needle = positions, needle
        self._mean[:], self._spread[:] = 0, 1
        random = np.random.default_rng([seed, _STREAM])
        shape = (kv_heads, len(positions), size)
        is_used = np.argsort(random.random((kv_heads, size)), axis=1) < needle.channels
        common = random.standard_normal((kv_heads, size)) * (is_used.all(axis=1, keepdims=True) | ~is_used)
        self._common = (common / np.linalg.norm(common, axis=1, keepdims=True)).astype(np.float32)
        directions = random.standard_normal(shape) * is_used[:, None]
        directions -= (directions @ self._common[..., None]) * self._common[:, None]  # zero unless all are used
        self._directions = directions / np.linalg.norm(directions, axis=-1, keepdims=True)
        self.needle_values = random.choice([-1.0, 1.0], shape).astype(np.float32)

    @cached_property
    def query(self) -> Singles:
        """float32 [needles, kv_heads x D]: for a scale of 1 / sqrt(D)."""
        strength = GAP / self.needle.cosine
        queries: Singles = (
            (strength * self._directions.swapaxes(0, 1)).reshape(len(self.positions), -1).astype(np.float32)
        )
        return queries

    def read_tokens(self, head: int, first: int, end: int) -> tuple[Singles, Singles]:
        """Return keys and values of a KV head, float32 [end - first, D] each."""
        noise, values = super().read_tokens(head, first, end)
        common, values = self._common[head], values.copy()
        noise = noise - (noise @ common)[:, None] * common  # so that all distractors have the same share of it
        noise *= np.float32(math.sqrt(1 - self.needle.common)) / np.linalg.norm(noise, axis=1, keepdims=True)
        keys = np.float32(math.sqrt(self.size)) * (noise + np.float32(math.sqrt(self.needle.common)) * common)
        for index in np.flatnonzero((self.positions >= first) & (self.positions < end)):
            direction, row = self._directions[head, index], self.positions[index] - first
            residual = keys[row] - (keys[row] @ direction) * direction
            residual *= math.sqrt(1 - self.needle.cosine**2) / np.linalg.norm(residual)
            keys[row] = math.sqrt(self.size) * (self.needle.cosine * direction + residual)
            values[row] = self.needle_values[head, index]
        return keys, values


def question(attrs: KVAttributes, haystack: Haystack, context: int, threads: int) -> dict[str, Array]:
    """Return the inputs of ``KVAttention``, by name and in order, for a call of one query for each needle.

    Args:
        attrs: of the node.
        haystack: keys, values and queries.
        context: tokens that the cache holds.
        threads: to write it with.
    """
    tokens, empty = len(haystack.positions), np.zeros(0, np.float32)
    new = [haystack.read_tokens(head, context, context + tokens) for head in range(haystack.kv_heads)]
    key, value = (np.stack(arrays, axis=1).reshape(1, tokens, -1) for arrays in zip(*new, strict=True))
    return {
        "query": haystack.query[None],
        "key": key,
        "value": value,
        "past": np.array([context]),
        "new": np.array([tokens]),
        "sink_logits": empty,
        "sink_query": empty,
        **attention_state.fill(attrs, haystack, context, _pages(attrs, haystack, context), threads),
        "summaries": summaries(attrs, haystack, context, threads),
    }


def summaries(attrs: KVAttributes, haystack: Haystack, context: int, threads: int) -> Singles:
    """Return the summaries of a cache of ``context`` tokens, float32 [1, Hk, P, Z]; only they depend on a policy."""
    pages = _pages(attrs, haystack, context)
    if not attrs.retrieves:
        return np.zeros((1, haystack.kv_heads, pages, 0), np.float32)
    return attention_state.summarize(attrs.summary, attrs.page, haystack, context, pages, threads)


def _pages(attrs: KVAttributes, haystack: Haystack, context: int) -> int:
    return -(-(context + len(haystack.positions)) // attrs.page)
