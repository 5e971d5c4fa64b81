"""Ways to round keys and values, emulated: tensors go in and come back as a cache would give them back.

Pages are [heads, pages, tokens, channels], what has no pages is [heads, tokens, channels], float32. None of this is a
kernel: it says what a method would do to numbers, not how fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from graphopt.numerics.rotations.hadamard import hadamard

Tensor = torch.Tensor
Round = Callable[[Tensor], Tensor]

_TINY = 1e-20
TOKENS, CHANNELS = -2, -1
"""The axis that a set of numbers with common scales lies along."""


@cache
def rotation(size: int) -> Tensor:
    """Return an orthogonal Hadamard matrix [size, size]."""
    return torch.from_numpy(hadamard(size).astype(np.float32) / np.float32(math.sqrt(size)))


def asymmetric(x: Tensor, axis: int, bits: int, clip: float = 1.0, shares: Sequence[float] = ()) -> Tensor:
    """Round to 2^bits equal steps between the ends of each set along ``axis``.

    Args:
        x: any shape.
        axis: of the numbers that share a low and a step.
        bits: of a code.
        clip: the share of the span that codes cover, its middle.
        shares: where there are some, each set takes the one of the least squared error instead (SKVQ).
    """
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    best, least = x, None
    for share in shares or (clip,):
        half = (high - low) / 2 * share
        first, step = (low + high) / 2 - half, (2 * half / (2**bits - 1)).clamp_min(_TINY)
        rounded = first + step * ((x - first) / step).round().clamp(0, 2**bits - 1)
        error = (rounded - x).square().sum(axis, keepdim=True)
        best = rounded if least is None else torch.where(error < least, rounded, best)
        least = error if least is None else torch.minimum(error, least)
    return best


def sizes_of_keys(x: Tensor) -> Tensor:
    """Return how large the keys of each page are, as ``token_factors`` of ``KVAttention`` have it, [.., tokens, 1]."""
    shares = x.abs() / x.abs().amax(TOKENS, keepdim=True).clamp_min(_TINY)
    return shares.square().mean(CHANNELS, keepdim=True).sqrt().clamp_min(_TINY)


def with_factors(round_rest: Round) -> Round:
    """Divide each key of a page by its size, and round what is left."""

    def apply(x: Tensor) -> Tensor:
        sizes = sizes_of_keys(x)
        return round_rest(x / sizes) * sizes

    return apply


def beside_page_before(round_rest: Round, page: int = 64) -> Round:
    """Round what tokens differ by from the mean of the page before theirs, that of the first one from zero.

    Takes pages, or tokens without pages.
    """

    def apply(x: Tensor) -> Tensor:
        if x.dim() == 3:
            padding = x[:, -1:].expand(-1, -x.shape[1] % page, -1)
            return apply(torch.cat([x, padding], 1).unflatten(1, (-1, page))).flatten(1, 2)[:, : x.shape[1]]
        means = x.mean(TOKENS, keepdim=True)
        before = torch.cat([torch.zeros_like(means[:, :1]), means[:, :-1]], 1)
        return round_rest(x - before) + before

    return apply


def tabled(x: Tensor, axis: int, bits: int) -> Tensor:
    """Round to the best 2^bits levels of a normal distribution, by mean and deviation of each set (as KVQuant)."""
    mean, deviation = x.mean(axis, keepdim=True), x.std(axis, keepdim=True).clamp_min(_TINY)
    levels = normal_levels(bits)
    borders = (levels[1:] + levels[:-1]) / 2
    rounded: Tensor = mean + deviation * levels[torch.bucketize((x - mean) / deviation, borders)]
    return rounded


@cache
def normal_levels(bits: int) -> Tensor:
    """Return the levels of the least squared error for a normal distribution (Lloyd, Max), [2^bits]."""
    points = torch.special.ndtri((torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)).float()
    levels: Tensor = points[torch.linspace(0.5, 2**bits - 0.5, 2**bits).mul(len(points) / 2**bits).long()]
    for _ in range(200):
        place = torch.bucketize(points, (levels[1:] + levels[:-1]) / 2)
        sums = torch.zeros_like(levels).index_add_(0, place, points)
        levels = sums / torch.bincount(place, minlength=len(levels)).clamp_min(1)
    return levels


def normalized(round_rest: Round, rounds: int = 16) -> Round:
    """Divide rows and columns of each page by their deviations, in turns, and round what is left (KVarN)."""

    def apply(x: Tensor) -> Tensor:
        rest, rows, columns = x, torch.ones_like(x[..., :1]), torch.ones_like(x[..., :1, :])
        for _ in range(rounds):
            of_row = rest.std(CHANNELS, keepdim=True).clamp_min(_TINY)
            rest, rows = rest / of_row, rows * of_row
            of_column = rest.std(TOKENS, keepdim=True).clamp_min(_TINY)
            rest, columns = rest / of_column, columns * of_column
        return round_rest(rest) * rows * columns

    return apply


def with_outliers(round_rest: Round, share: float) -> Round:
    """Keep the share of numbers that are largest in their page, and round the others as if those were 0 (KVQuant)."""

    def apply(x: Tensor) -> Tensor:
        count = max(1, round(share * x.shape[-1] * x.shape[-2]))
        centred = x - x.mean(TOKENS, keepdim=True)
        least = centred.abs().flatten(-2).topk(count, -1).values[..., -1, None, None]
        is_large = centred.abs() >= least
        return torch.where(is_large, x, round_rest(torch.where(is_large, x - centred, x)))

    return apply


def with_low_rank(round_page: Round, rank: int) -> Round:
    """Add the best matrix of that rank to what rounding a page leaves over (GEAR)."""

    def apply(x: Tensor) -> Tensor:
        rounded = round_page(x)
        left, sizes, right = torch.linalg.svd(x - rounded, full_matrices=False)
        residual: Tensor = left[..., :rank] * sizes[..., None, :rank] @ right[..., :rank, :]
        return rounded + residual

    return apply


def blocks_of_32(x: Tensor, kind: str) -> Tensor:
    """Round as llama.cpp's blocks of 32 numbers: q8_0, q5_0 or q4_0, each with a step in float16."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    if kind == "q8_0":
        step = blocks.abs().amax(-1, keepdim=True) / 127
        codes = (blocks / step.clamp_min(_TINY)).round().clamp(-128, 127)
    else:
        middle = {"q5_0": 16, "q4_0": 8}[kind]
        step = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -middle
        inverse = torch.where(step == 0, 0.0, 1 / step)
        codes = (blocks * inverse + middle + 0.5).floor().clamp(0, 2 * middle - 1) - middle
    rounded: Tensor = codes * step.half().float()
    return rounded.reshape(x.shape)


def symmetric(x: Tensor, bits: int) -> Tensor:
    """Round each token to codes around zero with one scale, as blocks of ``PagedAttention`` do."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min(_TINY)
    step = 2 * largest / (2**bits - 1)
    rounded: Tensor = ((x + largest) / step).round().clamp(0, 2**bits - 1) * step - largest
    return rounded


@dataclass(frozen=True)
class Tail:
    """Which tokens stay floats.

    Attributes:
        page: tokens of a page.
        first: pages at the beginning.
        newest: full pages, besides the one that is being filled.
    """

    page: int = 64
    first: int = 1
    newest: int = 1


@dataclass(frozen=True)
class Method:
    """One way to round a cache.

    Attributes:
        name: what it is.
        rounds: what rounds keys and what rounds values; they get them in the basis below.
        bits: of a code of a page, on average; of llama.cpp's blocks with their steps.
        tail: ``None``: every token is rounded when it comes.
        rotated: keys and values are rounded behind a Hadamard rotation of their heads.
        before_rotary: keys are rounded as they are before the rotary embedding.
        centred: the mean of all keys is taken off first, which no softmax sees.
    """

    name: str
    rounds: tuple[Round, Round]
    bits: float
    tail: Tail | None = None
    rotated: bool = True
    before_rotary: bool = False
    centred: bool = False

    def apply(self, keys: Tensor, values: Tensor, rotary: Any = None, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Return keys and values [heads, tokens, channels] as this cache gives them back.

        Args:
            keys: behind the rotary embedding.
            values: the same shape.
            rotary: called with keys and a direction, 1 or -1, to embed positions or take them off.
            layer: whose they are; all are treated alike.
        """
        del layer
        if self.before_rotary:
            keys = rotary(keys, -1)
        middle = keys.mean(TOKENS, keepdim=True) if self.centred else 0
        keys = self._rounded(keys - middle, self.rounds[0]) + middle
        return (rotary(keys, 1) if self.before_rotary else keys), self._rounded(values, self.rounds[1])

    def _rounded(self, x: Tensor, round_numbers: Round) -> Tensor:
        basis = rotation(x.shape[-1]) if self.rotated else None
        y = x if basis is None else x @ basis
        if self.tail is None:
            y = round_numbers(y)
        else:
            tokens, page = x.shape[1], self.tail.page
            padding = y[:, -1:].expand(-1, -tokens % page, -1)
            pages = torch.cat([y, padding], 1).unflatten(1, (-1, page))
            y = round_numbers(pages).flatten(1, 2)[:, :tokens]
        return y if basis is None else y @ basis.mT
