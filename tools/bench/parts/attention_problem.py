"""What is computed: one step of attention over a cache, for one sequence and one layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tools.bench.parts.problem import Array, Settings

Singles = npt.NDArray[np.float32]
T = TypeVar("T")

_BLOCK = 1024
"""Tokens that are drawn together."""

_OUTLIERS, _MEAN, _SPREAD = 4, 8.0, 2.0
_SCORES = 2.5


@dataclass(frozen=True)
class AttentionCase:
    """One step to time.

    Attributes:
        context: tokens that the last query sees, itself included.
        tokens: new tokens of the step, the last of the context.
        heads: query heads.
        kv_heads: KV heads.
        size: of a head.
        page: tokens of a page, for engines that have pages.
        budget: tokens that are retrieved by default.
        kind: ``"attention"``, or ``"curve"`` for a point of the curve.
    """

    context: int
    tokens: int
    heads: int
    kv_heads: int
    size: int
    page: int
    budget: int
    kind: str = "attention"

    @property
    def past(self) -> int:
        """Tokens that are stored before the step."""
        return self.context - self.tokens

    def __str__(self) -> str:
        heads = f"{self.heads} heads, {self.kv_heads} KV heads of {self.size}"
        return f"{self.tokens} new of {self.context} tokens, {heads}, pages of {self.page}, budget {self.budget}"


class Sequence:
    """Random keys and values, the same for all engines, drawn on demand.

    A few channels of a key are large throughout, with one sign, as in models (KIVI, Liu et al. 2024). Queries are
    scaled such that scores have a standard deviation of 2.5: over N tokens a softmax then weighs about as many as
    N / 500, which is neither all of them nor one.
    """

    def __init__(self, kv_heads: int, size: int, seed: int = 0) -> None:
        """Draw which channels of each head are large."""
        self.kv_heads, self.size, self.seed = kv_heads, size, seed
        random = np.random.default_rng(seed)
        self._mean = np.zeros((kv_heads, size), np.float32)
        self._spread = np.ones((kv_heads, size), np.float32)
        for head in range(kv_heads):
            large = random.choice(size, min(_OUTLIERS, size), replace=False)
            self._mean[head, large] = _MEAN * random.choice([-1, 1], len(large))
            self._spread[head, large] = _SPREAD

    def queries(self, tokens: int, heads: int) -> Singles:
        """Return queries, float32 [tokens, heads, size]."""
        normals = np.random.default_rng([self.seed, 1]).standard_normal((tokens, heads, self.size), np.float32)
        # The sum over channels of (spread / sqrt(size))^2 is what a query of ones would give scores for a variance.
        variance = np.mean(np.square(self._spread, dtype=np.float64), axis=1)
        queries: Singles = normals * np.repeat(_SCORES / np.sqrt(variance), heads // self.kv_heads)[:, None].astype(
            np.float32
        )
        return queries

    def read_tokens(self, head: int, first: int, end: int) -> tuple[Singles, Singles]:
        """Return keys and values of a KV head, float32 [end - first, size] each."""
        blocks = range(first // _BLOCK, -(-end // _BLOCK))
        numbers = np.concatenate([self._block(head, block) for block in blocks], axis=1)
        keys, values = numbers[:, first - blocks.start * _BLOCK : end - blocks.start * _BLOCK]
        return keys * self._spread[head] + self._mean[head], values

    def _block(self, head: int, block: int) -> Singles:
        random = np.random.Generator(np.random.SFC64([self.seed, 2, head, block]))
        return random.standard_normal((2, _BLOCK, self.size), np.float32)


@dataclass(frozen=True)
class AttentionProblem:
    """A case with its numbers; what engines derive from them is kept as long as the problem.

    Attributes:
        case: the case.
        sequence: where keys and values come from.
        settings: what all engines share.
    """

    case: AttentionCase
    sequence: Sequence
    settings: Settings
    _results: dict[object, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def query(self) -> Singles:
        """float32 [tokens, heads, size]."""
        return self.sequence.queries(self.case.tokens, self.case.heads)

    @cached_property
    def cache(self) -> tuple[Singles, Singles]:
        """All keys and values, new ones included, float32 [1, kv_heads, context, size] each."""
        case = self.case
        keys, values = np.empty((2, 1, case.kv_heads, case.context, case.size), np.float32)

        def draw(head: int) -> None:
            for first in range(0, case.context, 16 * _BLOCK):
                end = min(case.context, first + 16 * _BLOCK)
                keys[0, head, first:end], values[0, head, first:end] = self.sequence.read_tokens(head, first, end)

        in_threads(draw, case.kv_heads, self.settings.memory.threads)
        return keys, values

    @cached_property
    def new(self) -> tuple[Singles, Singles]:
        """Keys and values of the new tokens, float32 [1, kv_heads, tokens, size] each."""
        case = self.case
        pairs = [self.sequence.read_tokens(head, case.past, case.context) for head in range(case.kv_heads)]
        keys, values = np.array(pairs).swapaxes(0, 1)[:, None]
        return keys, values

    @property
    def scale(self) -> float:
        """Factor of the product of a query and a key."""
        return 1 / math.sqrt(self.case.size)

    @property
    def bytes_of_activations(self) -> int:
        """What query, new keys and values, and y take in float32."""
        return 8 * self.case.tokens * self.case.size * (self.case.heads + self.case.kv_heads)

    def copies(self, bytes_of_one: int) -> int:
        """Return how many caches a call goes through to read four times the last-level cache."""
        return max(1, -(-4 * self.settings.memory.cache_bytes // bytes_of_one))

    def keep(self, key: object, make: Callable[[], T]) -> T:
        """Return what ``make`` returned when it was first called for ``key``."""
        if key not in self._results:
            self._results[key] = make()
        result: T = self._results[key]
        return result

    def of_copy(self, reference: Array, copy: int) -> Array:
        """Return ``reference``: all copies hold the same tokens."""
        return reference


def in_threads(work: Callable[[int], None], count: int, threads: int) -> None:
    """Call ``work`` with 0 to ``count`` - 1, several at a time: NumPy works without Python's lock."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(count)))


def runs(numbers: npt.NDArray[np.int64], limit: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the parts of rising ``numbers`` that have no gaps, none of them longer than ``limit``."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    for part in np.split(numbers, breaks):
        yield from (part[first : first + limit] for first in range(0, len(part), limit))
