"""Ways to round keys and values, emulated: functions from tensors to the tensors that a cache would return.

Pages are [heads, pages, tokens, channels], tensors without pages are [heads, tokens, channels], float32. Nothing here
is a kernel: it shows the effect of a method on numbers, not its speed.
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
from graphopt.runtime_ops.kv_attention.spec.layout import scales_above, scales_below
from graphopt.runtime_ops.paged_attention.spec.layout import first_with_residual

Tensor = torch.Tensor
Round = Callable[[Tensor], Tensor]

_TINY = 1e-20
TOKENS, CHANNELS = -2, -1
"""Axes along which numbers share a scale."""


@cache
def rotation(size: int) -> Tensor:
    """Return an orthogonal Hadamard matrix [size, size]."""
    return torch.from_numpy(hadamard(size).astype(np.float32) / np.float32(math.sqrt(size)))


def _float16(x: Tensor, direction: Callable[[Any], Any]) -> Tensor:
    """Return the float16 beside each number that ``direction`` says, as float32."""
    return torch.from_numpy(direction(x.numpy()).astype(np.float32))


def asymmetric(x: Tensor, axis: int, bits: int, clip: float = 1.0, shares: Sequence[float] = ()) -> Tensor:
    """Round to 2^bits equal steps between the ends of each set along ``axis``; low and step are float16, as in pages.

    Args:
        x: any shape.
        axis: of the numbers that share a low and a step.
        bits: of a code.
        clip: the share of the span that codes cover, its middle.
        shares: if given, each set takes the one of least squared error instead of ``clip`` (SKVQ).
    """
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    best, least_error = x, None
    for share in shares or (clip,):
        margin = (high - low) * ((1 - share) / 2)
        first = _float16(low + margin, scales_below)
        step = _float16(((high - margin - first) / (2**bits - 1)).clamp_min(0), scales_above).clamp_min(_TINY)
        candidate = first + step * ((x - first) / step).round().clamp(0, 2**bits - 1)
        error = (candidate - x).square().sum(axis, keepdim=True)
        best = candidate if least_error is None else torch.where(error < least_error, candidate, best)
        least_error = error if least_error is None else torch.minimum(error, least_error)
    return best


def sizes_of_keys(x: Tensor) -> Tensor:
    """Return how large the keys of each page are, as ``token_factors`` of ``KVAttention`` have it, [.., tokens, 1]."""
    shares = x.abs() / x.abs().amax(TOKENS, keepdim=True).clamp_min(_TINY)
    return shares.square().mean(CHANNELS, keepdim=True).sqrt().clamp_min(_TINY)


def with_factors(round_rest: Round) -> Round:
    """Divide each key of a page by its size, then round."""

    def apply(x: Tensor) -> Tensor:
        sizes = sizes_of_keys(x)
        return round_rest(x / sizes) * sizes

    return apply


def beside_page_before(round_rest: Round, page: int = 64) -> Round:
    """Round the difference of tokens from the mean of the page before theirs; of the first page, from zero.

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


def round_to_table(x: Tensor, axis: int, bits: int) -> Tensor:
    """Round to the best 2^bits levels of a normal distribution, by mean and deviation of each set (as KVQuant)."""
    mean, deviation = x.mean(axis, keepdim=True), x.std(axis, keepdim=True).clamp_min(_TINY)
    levels = normal_levels(bits)
    borders = (levels[1:] + levels[:-1]) / 2
    result: Tensor = mean + deviation * levels[torch.bucketize((x - mean) / deviation, borders)]
    return result


@cache
def normal_levels(bits: int) -> Tensor:
    """Return the levels of the least squared error for a normal distribution (Lloyd, Max), [2^bits]."""
    points = torch.special.ndtri((torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)).float()
    levels: Tensor = points[torch.linspace(0.5, 2**bits - 0.5, 2**bits).mul(len(points) / 2**bits).long()]
    for _ in range(200):
        cell = torch.bucketize(points, (levels[1:] + levels[:-1]) / 2)
        sums = torch.zeros_like(levels).index_add_(0, cell, points)
        levels = sums / torch.bincount(cell, minlength=len(levels)).clamp_min(1)
    return levels


def with_normalized_pages(round_rest: Round, rounds: int = 16) -> Round:
    """Divide rows and columns of each page by their deviations, in turns, then round (KVarN)."""

    def apply(x: Tensor) -> Tensor:
        residual, rows, columns = x, torch.ones_like(x[..., :1]), torch.ones_like(x[..., :1, :])
        for _ in range(rounds):
            row_deviation = residual.std(CHANNELS, keepdim=True).clamp_min(_TINY)
            residual, rows = residual / row_deviation, rows * row_deviation
            column_deviation = residual.std(TOKENS, keepdim=True).clamp_min(_TINY)
            residual, columns = residual / column_deviation, columns * column_deviation
        return round_rest(residual) * rows * columns

    return apply


def with_outliers(round_rest: Round, share: float) -> Round:
    """Keep the share of numbers that are largest in their page, and round the rest with 0 in their place (KVQuant)."""

    def apply(x: Tensor) -> Tensor:
        count = max(1, round(share * x.shape[-1] * x.shape[-2]))
        deviations = x - x.mean(TOKENS, keepdim=True)
        threshold = deviations.abs().flatten(-2).topk(count, -1).values[..., -1, None, None]
        is_large = deviations.abs() >= threshold
        return torch.where(is_large, x, round_rest(torch.where(is_large, x - deviations, x)))

    return apply


def with_low_rank(round_page: Round, rank: int) -> Round:
    """Add the best approximation of a page's rounding error of that rank (GEAR)."""

    def apply(x: Tensor) -> Tensor:
        rounded_page = round_page(x)
        left_vectors, sizes, right_vectors = torch.linalg.svd(x - rounded_page, full_matrices=False)
        residual: Tensor = left_vectors[..., :rank] * sizes[..., None, :rank] @ right_vectors[..., :rank, :]
        return rounded_page + residual

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
    result: Tensor = codes * step.half().float()
    return result.reshape(x.shape)


def symmetric(x: Tensor, bits: int) -> Tensor:
    """Round each token to codes around zero with one scale, as blocks of ``PagedAttention`` do."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min(_TINY)
    step = 2 * largest / (2**bits - 1)
    result: Tensor = ((x + largest) / step).round().clamp(0, 2**bits - 1) * step - largest
    return result


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

    def are_rounded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return whether a query at ``positions`` [p, 1] reads ``tokens`` [1, n] rounded, bool [p, n]."""
        page = tokens // self.page
        return (page >= self.first) & (page < positions // self.page - self.newest)


@dataclass(frozen=True)
class Residuals:
    """Which tokens of blocks have second codes: the newest of a block that is not full.

    Attributes:
        block: tokens of a block.
        first: tokens at the beginning of a text that have second codes for ever.
    """

    block: int
    first: int = 0

    def are_rounded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return whether a query at ``positions`` [p, 1] reads ``tokens`` [1, n] by their first codes, bool [p, n]."""
        count = positions % self.block + 1
        is_newest = tokens % self.block >= first_with_residual(count, self.block)
        read_twice: Tensor = is_newest & (tokens // self.block == positions // self.block) | (tokens < self.first)
        return ~read_twice


@dataclass(frozen=True)
class Method:
    """One way to round a cache.

    Attributes:
        name: what it is.
        rounds: the rounding of keys and that of values, in the basis below.
        bits: of a code of a page, on average; for llama.cpp's blocks with their steps.
        tail: tokens that stay floats; ``None``: every token is rounded at once.
        rotates: keys and values are rounded after a Hadamard rotation of their heads.
        before_rotary: keys are rounded before the rotary embedding.
        centres: the mean of all keys is subtracted first, which changes no softmax.
    """

    name: str
    rounds: tuple[Round, Round]
    bits: float
    tail: Tail | None = None
    rotates: bool = True
    before_rotary: bool = False
    centres: bool = False

    def apply(self, keys: Tensor, values: Tensor, rotary: Any = None, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Return keys and values [heads, tokens, channels] as this cache returns them.

        Args:
            keys: after the rotary embedding.
            values: the same shape.
            rotary: called with keys and a direction: 1 applies the rotary embedding, -1 undoes it.
            layer: ignored; all layers are rounded alike.
        """
        del layer
        if self.before_rotary:
            keys = rotary(keys, -1)
        middle = keys.mean(TOKENS, keepdim=True) if self.centres else 0
        keys = self._round(keys - middle, self.rounds[0]) + middle
        return (rotary(keys, 1) if self.before_rotary else keys), self._round(values, self.rounds[1])

    def _round(self, x: Tensor, round_numbers: Round) -> Tensor:
        basis = rotation(x.shape[-1]) if self.rotates else None
        y = x if basis is None else x @ basis
        if self.tail is None:
            y = round_numbers(y)
        else:
            tokens, page = x.shape[1], self.tail.page
            padding = y[:, -1:].expand(-1, -tokens % page, -1)
            pages = torch.cat([y, padding], 1).unflatten(1, (-1, page))
            y = round_numbers(pages).flatten(1, 2)[:, :tokens]
        return y if basis is None else y @ basis.mT
