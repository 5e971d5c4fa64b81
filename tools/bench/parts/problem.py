"""What is computed: products of random activations with random weights, and copies of them that no cache can hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tools.bench.parts.machine import Memory

Array = npt.NDArray[Any]
T = TypeVar("T")

LANES = 16
"""Output channels that stay together when a copy is shuffled: the tile of graphopt's own layout, the widest of all."""


def aligned_copy(array: Array) -> Array:
    """Return a copy that begins at a multiple of 64 bytes, as onnxruntime's own tensors do and NumPy's do not."""
    room = np.empty(array.nbytes + 64, np.uint8)
    copy: Array = room[-room.ctypes.data % 64 :][: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Attributes:
        kind: ``"product"``, y = x W, or ``"transform"``, y = x H.
        rows: rows of x, the tokens.
        inner: columns of x.
        outer: columns of y.
        group: weights along a column that share a scale.
    """

    kind: str
    rows: int
    inner: int
    outer: int
    group: int

    def __str__(self) -> str:
        if self.kind == "transform":
            return f"{self.rows} rows, Hadamard of {self.inner}"
        return f"{self.rows} rows, {self.inner} x {self.outer}, group {self.group}"


@dataclass(frozen=True)
class Settings:
    """What all engines share: the machine's memory and their threads, where to write, and where ggml was built."""

    memory: Memory
    work: Path
    ggml: Path | None = None


@dataclass
class Weights:
    """A random matrix in the order [outer, inner], the same for all rows; what engines derive from it is kept."""

    inner: int
    outer: int
    seed: int = 0
    _results: dict[object, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def values(self) -> npt.NDArray[np.float32]:
        """The weights, float32 [outer, inner], scaled such that y is about as large as x."""
        random = np.random.default_rng(self.seed)
        return random.standard_normal((self.outer, self.inner), np.float32) / np.float32(np.sqrt(self.inner))

    def keep(self, key: object, make: Callable[[], T]) -> T:
        """Return what ``make`` returned when it was first called for ``key``: rounding a matrix takes seconds."""
        if key not in self._results:
            self._results[key] = make()
        result: T = self._results[key]
        return result


@dataclass(frozen=True)
class Problem:
    """A case with its numbers.

    A decode step reads each weight once, from memory. So an engine gets several copies of the weights, together a
    multiple of the last-level cache, and a call goes through all of them. A copy has its output channels in an order of
    its own: onnxruntime shares packed weights that are equal byte for byte. Each copy has an x of its own, or
    a runtime could merge the products that read the same.
    """

    case: Case
    weights: Weights
    settings: Settings

    @cached_property
    def x(self) -> npt.NDArray[np.float32]:
        """The activations, float32 [rows, inner]."""
        return np.random.default_rng(1).standard_normal((self.case.rows, self.case.inner), np.float32)

    @property
    def bytes_of_activations(self) -> int:
        """What x and y take in float32."""
        return 4 * self.case.rows * (self.case.inner + self.case.outer)

    def copies(self, bytes_of_one: int) -> int:
        """Return how many copies take part; where arithmetic takes the time and not memory, fewer do."""
        times = 4 if self.case.rows < 64 else 1
        return max(2, -(-times * self.settings.memory.cache_bytes // bytes_of_one))

    def order(self, copy: int) -> npt.NDArray[np.intp]:
        """Return the order of the groups of :data:`LANES` output channels in ``copy``; copy 0 is as it was."""
        tiles = np.arange(self.case.outer // LANES)
        return np.random.default_rng(copy).permutation(tiles) if copy else tiles

    def shuffle(self, array: Array, copy: int, axis: int = 0) -> Array:
        """Return ``array``, whose ``axis`` runs over output channels or even sets of them, as ``copy`` has it."""
        tiles = self.case.outer // LANES
        shape = array.shape
        split = array.reshape(*shape[:axis], tiles, shape[axis] // tiles, *shape[axis + 1 :])
        return np.ascontiguousarray(split.take(self.order(copy), axis).reshape(shape))

    def of_copy(self, reference: Array, copy: int) -> Array:
        """Return what ``copy`` must compute, where copy 0 must compute ``reference``, [rows, outer]."""
        return self.shuffle(reference, copy, axis=1) if self.case.kind == "product" else reference
