"""Coordinates in which keys and values are rounded, calibrated on another text: few of them carry most of attention.

    q k = (q B^-1)(B k): B makes queries white and keys' coordinates independent, so errors of coordinates add up
    o = W v: the same for values, with the output projection instead of queries

Coordinates of larger variance get more bits (reverse water filling, Cover and Thomas, section 10.3).
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
    """Statistics of one layer over a text.

    Attributes:
        keys: covariance of keys after the rotary embedding, [Hk, D, D].
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
    def from_text(cls, queries: Tensor, keys: Tensor, values: Tensor, output_weight: Tensor) -> Statistics:
        """Return the statistics of a text.

        Args:
            queries: [Hq, tokens, D], scaled.
            keys: [Hk, tokens, D].
            values: as the keys.
            output_weight: of the product after attention, [width, Hq D].
        """
        heads, tokens, size = keys.shape
        deviations = [x - x.mean(1, keepdim=True) for x in (keys, values)]
        rows = queries.unflatten(0, (heads, -1)).flatten(1, 2)
        weights = output_weight.T.unflatten(0, (heads, -1, size))  # [Hk, group, D, width]
        outputs = torch.einsum("hgdo,hgeo->hde", weights, weights)
        key_covariance, moments, value_covariance = (x.mT @ x / tokens for x in (deviations[0], keys, deviations[1]))
        return cls(key_covariance, moments, rows.mT @ rows / rows.shape[1], value_covariance, outputs)


@dataclass(frozen=True)
class Coordinates:
    """The basis in which keys or values of one layer are rounded.

    Attributes:
        matrix: rows times this are coordinates, [Hk, D, D], those of the largest variance last.
        back: its inverse.
        variance: of each coordinate, [Hk, D].
        bits: of each coordinate, [Hk, D], int64.
    """

    matrix: Tensor
    back: Tensor
    variance: Tensor
    bits: Tensor

    def round_pages(self, x: Tensor, round_coordinates: Callable[[Tensor, Tensor], Tensor], page: int) -> Tensor:
        """Round x [Hk, tokens, D] in pages: called with coordinates [Hk, pages, page, D] and bits [Hk, D]."""
        y = x @ self.matrix
        tokens = y.shape[1]
        padding = y[:, -1:].expand(-1, -tokens % page, -1)
        pages = torch.cat([y, padding], 1).unflatten(1, (-1, page))
        return round_coordinates(pages, self.bits).flatten(1, 2)[:, :tokens] @ self.back


def orthogonal(covariance: Tensor, weights: Tensor) -> Coordinates:
    """Return eigenvectors of the covariance, with variances scaled by the mean diagonal of the weights."""
    variance, basis = torch.linalg.eigh(covariance)
    scale = torch.diagonal(weights, dim1=-2, dim2=-1).mean(-1)[:, None]
    return Coordinates(basis, basis.mT, variance.clamp_min(1e-12) * scale, torch.zeros_like(variance, dtype=torch.long))


def karhunen_loeve(covariance: Tensor, weights: Tensor, damping: float = 1e-3) -> Coordinates:
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
    """Allot bits to the coordinates of all parts together, each next one where it reduces the error most."""
    variance = torch.cat([part.variance.flatten() for part in parts]).double()
    distortion = torch.tensor(_DISTORTION[: largest + 1], dtype=torch.float64)
    gains = variance[:, None] * (distortion[:-1] - distortion[1:])  # [coordinates, largest], each row falls
    indices = gains.flatten().topk(round(mean_bits * len(variance))).indices
    bits = torch.bincount(indices // largest, minlength=len(variance))
    pieces = bits.split([part.variance.numel() for part in parts])
    return [replace(part, bits=piece.view(part.variance.shape)) for part, piece in zip(parts, pieces, strict=True)]


def by_bits(x: Tensor, bits: Tensor, *, clips: dict[int, float], axis: int = TOKENS) -> Tensor:
    """Round coordinates [Hk, pages, tokens, D] with a low and a step per page; those of 0 bits become their mean."""
    numbers = x.mean(axis, keepdim=True).expand_as(x)
    for width in bits.unique().tolist():
        if width:
            coordinates = asymmetric(x, axis, width, clip=clips.get(width, 1.0))
            numbers = torch.where((bits == width)[:, None, None], coordinates, numbers)
    return numbers


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
            self.keys[layer].round_pages(keys, round_coordinates, self.tail.page),
            self.values[layer].round_pages(values, round_coordinates, self.tail.page),
        )


CLIPS = {1: 0.6, 2: 0.9}
"""The best two levels of a normal number are at 0.8 of its deviation, far inside the span of a page."""


def of_text(statistics: Sequence[Statistics], tail: Tail) -> list[SpectralMethod]:
    """Return methods along coordinates that are calibrated on another text than the measured one."""
    method_list = []
    for bits, value_bits in ((2.0, 2.0), (2.5, 1.5), (3.0, 2.0), (4.0, 4.0), (6.0, 6.0)):
        for kind, coordinates in (("along eigenvectors", orthogonal), ("balanced", karhunen_loeve)):
            keys = [allot([coordinates(layer.keys, layer.queries)], bits)[0] for layer in statistics]
            values = [allot([coordinates(layer.values, layer.outputs)], value_bits)[0] for layer in statistics]
            name = f"spectral, {kind}, {bits:g} bits of keys, {value_bits:g} of values"
            method_list.append(SpectralMethod(name, keys, values, (bits + value_bits) / 2, tail, CLIPS))
    return method_list
