"""Coordinates in which keys and values are rounded, calibrated on another text: few of them carry most of what is read.

    q k = (q B^-1)(B k): B makes queries white and keys' coordinates independent, so errors of coordinates add up
    o = W v: the same for values, with the weights behind attention instead of queries

A coordinate gets the more bits the more it varies (reverse water filling, Cover and Thomas, section 10.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tools.studies.caches.rounding import TOKENS, Tail, Tensor, asymmetric

_DISTORTION = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.00349, 0.00104, 0.0003, 0.00009)
"""Squared error of the best uniform rounding of a normal number to 0 to 8 bits (Max 1960)."""


@dataclass
class Statistics:
    """What a text says of one layer.

    Attributes:
        keys: covariance of keys behind the rotary embedding, [Hk, D, D].
        key_moments: their second moments, [Hk, D, D].
        queries: second moments of the queries of each KV head, [Hk, D, D], scaled as scores are.
        values: covariance of values, [Hk, D, D].
        outputs: second moments of the weights that read them, [Hk, D, D].
    """

    keys: Tensor
    key_moments: Tensor
    queries: Tensor
    values: Tensor
    outputs: Tensor

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor, values: Tensor, output_weight: Tensor) -> Statistics:
        """Return those of a text.

        Args:
            queries: [Hq, tokens, D], scaled.
            keys: [Hk, tokens, D].
            values: as the keys.
            output_weight: of the product behind attention, [width, Hq D].
        """
        heads, tokens, size = keys.shape
        centred = [x - x.mean(1, keepdim=True) for x in (keys, values)]
        rows = queries.unflatten(0, (heads, -1)).flatten(1, 2)
        weights = output_weight.T.unflatten(0, (heads, -1, size))  # [Hk, group, D, width]
        outputs = torch.einsum("hgdo,hgeo->hde", weights, weights)
        of_keys, moments, of_values = (x.mT @ x / tokens for x in (centred[0], keys, centred[1]))
        return cls(of_keys, moments, rows.mT @ rows / rows.shape[1], of_values, outputs)


@dataclass(frozen=True)
class Coordinates:
    """Where keys or values of one layer are rounded.

    Attributes:
        into: rows times this are coordinates, [Hk, D, D], the most varying last.
        back: its inverse.
        variance: of each coordinate, [Hk, D].
        bits: of each coordinate, [Hk, D], int64.
    """

    into: Tensor
    back: Tensor
    variance: Tensor
    bits: Tensor

    def rounded(self, x: Tensor, round_coordinates: Callable[[Tensor, Tensor], Tensor], page: int) -> Tensor:
        """Round x [Hk, tokens, D] in pages: called with coordinates [Hk, pages, page, D] and bits [Hk, D]."""
        y = x @ self.into
        tokens = y.shape[1]
        padding = y[:, -1:].expand(-1, -tokens % page, -1)
        pages = torch.cat([y, padding], 1).unflatten(1, (-1, page))
        return round_coordinates(pages, self.bits).flatten(1, 2)[:, :tokens] @ self.back


def orthogonal(covariance: Tensor, weights: Tensor) -> Coordinates:
    """Return eigenvectors of the covariance, and what varies there by the weights' trace."""
    variance, basis = torch.linalg.eigh(covariance)
    scale = torch.diagonal(weights, dim1=-2, dim2=-1).mean(-1)[:, None]
    return Coordinates(basis, basis.mT, variance.clamp_min(1e-12) * scale, torch.zeros_like(variance, dtype=torch.long))


def balanced(covariance: Tensor, weights: Tensor, damping: float = 1e-3) -> Coordinates:
    """Return coordinates in which errors count alike and numbers are independent (a Karhunen-Loeve transform).

    Args:
        covariance: of keys or values, [Hk, D, D].
        weights: second moments of what reads them, [Hk, D, D].
        damping: of the mean of the weights' diagonal, added to it.
    """
    size = weights.shape[-1]
    mean = torch.diagonal(weights, dim1=-2, dim2=-1).mean(-1)[:, None, None]
    values, vectors = torch.linalg.eigh(weights + damping * mean * torch.eye(size))
    root = vectors * values.clamp_min(1e-20).sqrt()[:, None] @ vectors.mT
    inverse = vectors * values.clamp_min(1e-20).rsqrt()[:, None] @ vectors.mT
    variance, basis = torch.linalg.eigh(root @ covariance @ root)
    return Coordinates(root @ basis, basis.mT @ inverse, variance.clamp_min(1e-12), torch.zeros_like(variance).long())


def allot(parts: list[Coordinates], mean_bits: float, largest: int = 8) -> list[Coordinates]:
    """Give bits to coordinates of all parts together, one by one where that takes most off the error."""
    variance = torch.cat([part.variance.flatten() for part in parts]).double()
    distortion = torch.tensor(_DISTORTION[: largest + 1], dtype=torch.float64)
    gains = variance[:, None] * (distortion[:-1] - distortion[1:])  # [coordinates, largest], each row falls
    chosen = gains.flatten().topk(round(mean_bits * len(variance))).indices
    bits = torch.bincount(chosen // largest, minlength=len(variance))
    pieces = bits.split([part.variance.numel() for part in parts])
    return [replace(part, bits=piece.view(part.variance.shape)) for part, piece in zip(parts, pieces, strict=True)]


def by_bits(x: Tensor, bits: Tensor, *, clips: dict[int, float], axis: int = TOKENS) -> Tensor:
    """Round coordinates [Hk, pages, tokens, D] with a low and a step per page; without bits the mean is left."""
    found = x.mean(axis, keepdim=True).expand_as(x)
    for width in bits.unique().tolist():
        if width:
            rounded = asymmetric(x, axis, width, clip=clips.get(width, 1.0))
            found = torch.where((bits == width)[:, None, None], rounded, found)
    return found


@dataclass(frozen=True)
class SpectralMethod:
    """Keys and values rounded along calibrated coordinates; used as :class:`tools.studies.caches.rounding.Method`.

    Attributes:
        name: what it is.
        keys: coordinates of each layer.
        values: the same.
        bits: of a code, on average.
        tail: which tokens stay floats.
        clips: share of the span that codes cover, by their bits.
    """

    name: str
    keys: Sequence[Coordinates]
    values: Sequence[Coordinates]
    bits: float
    tail: Tail
    clips: dict[int, float]

    def apply(self, keys: Tensor, values: Tensor, rotary: Any = None, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Return keys and values [heads, tokens, channels] of a layer as this cache gives them back."""
        del rotary
        round_coordinates = partial(by_bits, clips=self.clips)
        return (
            self.keys[layer].rounded(keys, round_coordinates, self.tail.page),
            self.values[layer].rounded(values, round_coordinates, self.tail.page),
        )


CLIPS = {1: 0.6, 2: 0.9}
"""Two levels of a normal number err least at 0.8 of its deviation, far inside of what a page spans."""


def of_text(statistics: Sequence[Statistics], tail: Tail) -> list[SpectralMethod]:
    """Return methods along coordinates that were calibrated on another text than is measured."""
    found = []
    for bits, value_bits in ((2.0, 2.0), (2.5, 1.5), (3.0, 2.0), (4.0, 4.0), (6.0, 6.0)):
        for kind, coordinates in (("along eigenvectors", orthogonal), ("balanced", balanced)):
            keys = [allot([coordinates(each.keys, each.queries)], bits)[0] for each in statistics]
            values = [allot([coordinates(each.values, each.outputs)], value_bits)[0] for each in statistics]
            name = f"spectral, {kind}, {bits:g} bits of keys, {value_bits:g} of values"
            found.append(SpectralMethod(name, keys, values, (bits + value_bits) / 2, tail, CLIPS))
    return found
