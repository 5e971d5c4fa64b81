"""Keys rounded for the queries of another text, as ``quantize_kv.key_feedback`` does it: emulated by its functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graphopt.numerics.formats.trellis import T2, TrellisFormat
from graphopt.quantization.rounding import native
from graphopt.quantization.rounding.ldl import key_feedback, whitening
from graphopt.runtime_ops.kv_attention.spec.layout import (
    factors_of_tokens,
    round_page,
    round_tokens,
    round_with_feedback,
    scales_above,
)
from tools.studies.caches.rounding import Residuals, Tail, Tensor, rotation
from tools.studies.caches.spectral import Statistics

_CLIPS = {1: 0.5, 2: 0.9}
_WITH_FACTORS = (1, 2, 3)
_UNITS = 1.45
"""A unit of ``t2`` in standard deviations, for the least squared error of normal numbers."""
_TINY = np.float32(1e-12)
_SHARES = tuple(np.linspace(1, 0.6, 9))
"""Of the largest number of a set: what codes span, for the least squared error."""

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class KeyBasis:
    """The basis in which the keys of a layer are rounded.

    Attributes:
        matrix: keys as rows times this are the coordinates that are rounded, [Hk, D, D].
        back: its inverse.
        feedback: float32 [Hk, D, D].
    """

    matrix: Doubles
    back: Doubles
    feedback: npt.NDArray[np.float32]

    @classmethod
    def from_statistics(cls, statistics: Statistics, *, whitens: bool) -> KeyBasis:
        """Return rotated heads, or rotated heads that ``key_whitening`` of ``quantize_kv`` multiplies."""
        size = statistics.queries.shape[-1]
        matrix = np.broadcast_to(rotation(size).numpy().astype(np.float64), statistics.queries.shape)
        if whitens:
            matrix = matrix @ whitening(matrix.swapaxes(-1, -2) @ statistics.key_moments.numpy() @ matrix)
        back = np.asarray(np.linalg.inv(matrix), np.float64)
        moments = back @ statistics.queries.numpy() @ back.swapaxes(-1, -2)
        return cls(matrix, back, key_feedback(moments).astype(np.float32))


@dataclass(frozen=True)
class FeedbackMethod:
    """Rotated keys and values in pages; used as :class:`tools.studies.caches.rounding.Method`.

    Attributes:
        name: what it is.
        bases: of the keys of each layer.
        key_bits: of a code of keys; 1 to 3 have factors by token, 1 and 2 clip, as ``quantize_kv`` has it by default.
        value_bits: of a code of values, which clip likewise.
        tail: which tokens stay floats.
    """

    name: str
    bases: Sequence[KeyBasis]
    key_bits: int
    value_bits: int
    tail: Tail

    @property
    def bits(self) -> float:
        """Of a code, on average."""
        return (self.key_bits + self.value_bits) / 2

    def apply(self, keys: Tensor, values: Tensor, rotary: Any = None, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Return keys and values [heads, tokens, channels] of a layer as this cache gives them back."""
        del rotary
        key_clip, value_clip = (_CLIPS.get(bits, 1.0) for bits in (self.key_bits, self.value_bits))
        key_basis, basis = self.bases[layer], rotation(keys.shape[-1]).numpy()
        coordinates = (keys.numpy() @ key_basis.matrix, values.numpy() @ basis)
        pages = [_pages(x.astype(np.float32), self.tail) for x in coordinates]
        factors = factors_of_tokens(pages[0]) if self.key_bits in _WITH_FACTORS else np.ones(1, np.float32)
        codes, low, step = round_with_feedback(pages[0] / factors, key_basis.feedback, 2**self.key_bits - 1, key_clip)
        rounded_keys = (low[..., np.newaxis, :] + step[..., np.newaxis, :] * codes.astype(np.float32)) * factors
        codes, low, step = round_page(pages[1], -1, 2**self.value_bits - 1, value_clip)
        rounded_values = low[..., np.newaxis] + step[..., np.newaxis] * codes.astype(np.float32)
        tokens = keys.shape[1]
        return _tokens(rounded_keys, key_basis.back, tokens), _tokens(rounded_values, basis.T, tokens)


@dataclass(frozen=True)
class FeedbackTrellis:
    """Rotated keys and values in pages, by a trellis: chains of keys go along tokens, those of values along channels.

    Attributes:
        name: what it is.
        bases: as of :class:`FeedbackMethod`.
        format: the trellis.
        keeps_size: whether each rounded set is scaled so that its projection on the original has the original's length.
        tail: which tokens stay floats.
    """

    name: str
    bases: Sequence[KeyBasis]
    format: TrellisFormat
    keeps_size: bool
    tail: Tail

    @property
    def bits(self) -> float:
        """Of a code."""
        return self.format.bits

    def apply(self, keys: Tensor, values: Tensor, rotary: Any = None, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Return keys and values [heads, tokens, channels] of a layer as this cache gives them back."""
        del rotary
        key_basis, basis = self.bases[layer], rotation(keys.shape[-1]).numpy()
        pairs = ((keys, key_basis.matrix), (values, basis))
        key_pages, value_pages = (_pages((x.numpy() @ matrix).astype(np.float32), self.tail) for x, matrix in pairs)
        factors = factors_of_tokens(key_pages)
        numbers = key_pages / factors
        means, sizes = numbers.mean(-2, keepdims=True), numbers.std(-2, keepdims=True)
        numbers, new_numbers = numbers - means, np.empty_like(numbers)
        for c in range(numbers.shape[-1]):
            x = numbers[..., c]
            new_numbers[..., c] = self._round(x, sizes[..., c])
            feedback_row = key_basis.feedback[:, np.newaxis, np.newaxis, c, c + 1 :]
            numbers[..., c + 1 :] -= (x - new_numbers[..., c])[..., np.newaxis] * feedback_row
        rounded_keys = (new_numbers + means) * factors
        rounded_values = self._round(value_pages, np.sqrt((value_pages**2).mean(-1, keepdims=True)))
        tokens = keys.shape[1]
        return _tokens(rounded_keys, key_basis.back, tokens), _tokens(rounded_values, basis.T, tokens)

    def _round(self, sets: npt.NDArray[np.float32], sizes: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Round sets [..., n], whose root mean squares are ``sizes`` [..., 1]."""
        steps = sizes * np.float32(_UNITS) + _TINY
        units = (sets / steps).reshape(1, -1, sets.shape[-1])
        codes = native.encode(units, self.format, np.ones((1, sets.shape[-1])))
        result = self.format.values.take(self.format.windows(codes)).reshape(sets.shape) * steps
        if self.keeps_size:
            squares, products = ((sets * side).sum(-1, keepdims=True) for side in (sets, result))
            result *= squares / np.maximum(products, _TINY)
        return np.asarray(result, np.float32)


def _pages(x: npt.NDArray[np.float32], tail: Tail) -> npt.NDArray[np.float32]:
    """Return tokens [heads, tokens, channels] as pages [heads, pages, page, channels]; the last one is filled up."""
    padding = np.repeat(x[:, -1:], -x.shape[1] % tail.page, axis=1)
    return np.concatenate([x, padding], axis=1).reshape(len(x), -1, tail.page, x.shape[-1])


def _tokens(pages: npt.NDArray[Any], back: npt.NDArray[Any], tokens: int) -> Tensor:
    """Return what pages hold in the basis that it came in, [heads, tokens, channels], without what filled them up."""
    rows = pages.reshape(len(pages), -1, pages.shape[-1])[:, :tokens] @ back
    return torch.from_numpy(rows.astype(np.float32))


@dataclass(frozen=True)
class FeedbackBlocks:
    """Rotated keys and values in blocks of a server, each token with a scale of its own.

    Attributes:
        name: what it is.
        bases: as of :class:`FeedbackMethod`.
        bits: of a code.
        tail: which tokens have second codes; ``None`` where every token is rounded when it comes, and that is all.
        parts: of a head, each with a scale of its own: a float32 for 1, else float16.
        shares: of the largest number of a part; its codes span the one of the least squared error.
    """

    name: str
    bases: Sequence[KeyBasis]
    bits: int
    tail: Residuals | None = None
    parts: int = 1
    shares: Sequence[float] = (1.0,)

    def apply(self, keys: Tensor, values: Tensor, rotary: Any = None, layer: int = 0) -> tuple[Tensor, ...]:
        """Return keys and values [heads, tokens, channels] of a layer as this cache gives them back.

        With a tail, behind them keys and values by the sums of both codes.
        """
        del rotary
        key_basis, basis, levels = self.bases[layer], rotation(keys.shape[-1]).numpy(), 2**self.bits - 1
        by_first: list[Tensor] = []
        by_both: list[Tensor] = []
        sides = ((keys, key_basis.matrix, key_basis.back, key_basis.feedback), (values, basis, basis.T, None))
        for x, matrix, back, feedback in sides:
            exact = (x.numpy() @ matrix).astype(np.float32).swapaxes(0, 1)
            first = self._numbers_of(exact, levels, feedback, self.shares)
            sums = first if self.tail is None else first + self._numbers_of(exact - first, levels, None, (1.0,))
            for tensors, tokens in ((by_first, first), (by_both, sums)):
                tensors.append(torch.from_numpy((tokens.swapaxes(0, 1) @ back).astype(np.float32)))
        return tuple(by_first if self.tail is None else by_first + by_both)

    def _numbers_of(
        self,
        tokens: npt.NDArray[Any],
        levels: int,
        feedback: npt.NDArray[Any] | None,
        shares: Sequence[float],
    ) -> npt.NDArray[Any]:
        """Return what the codes of tokens [tokens, heads, channels] stand for."""
        if self.parts == len(shares) == 1:
            return _restored_tokens(tokens, levels, feedback)
        steps = _steps_of_parts(tokens, levels, self.parts, shares)
        low = steps * np.float32(-levels / 2)
        numbers, new_numbers = tokens.copy(), np.empty_like(tokens)
        for c in range(tokens.shape[-1]):
            codes = np.rint((numbers[..., c] - low[..., c]) / steps[..., c]).clip(0, levels)
            new_numbers[..., c] = low[..., c] + steps[..., c] * codes
            if feedback is not None:
                error = numbers[..., c] - new_numbers[..., c]
                numbers[..., c + 1 :] -= error[..., np.newaxis] * feedback[:, c, c + 1 :]
        return new_numbers


def _steps_of_parts(tokens: npt.NDArray[Any], levels: int, parts: int, shares: Sequence[float]) -> npt.NDArray[Any]:
    """Return the step of each channel of tokens [..., channels], whose parts have steps of their own."""
    sets = tokens.reshape(*tokens.shape[:-1], parts, -1)
    largest = np.abs(sets).max(-1, keepdims=True)
    candidates = np.stack([np.maximum(2 * largest * np.float32(share) / levels, _TINY) for share in shares])
    if parts > 1:  # in the bytes of one float32; 1e-7 is above the least float16
        candidates = np.maximum(scales_above(candidates).astype(np.float32), np.float32(1e-7))
    low = candidates * np.float32(-levels / 2)
    errors = [
        np.square(first + step * np.rint((sets - first) / step).clip(0, levels) - sets).sum(-1, keepdims=True)
        for first, step in zip(low, candidates, strict=True)
    ]
    best = np.take_along_axis(candidates, np.argmin(errors, axis=0)[np.newaxis], axis=0)[0]
    return np.broadcast_to(best, sets.shape).reshape(tokens.shape)


def _restored_tokens(
    tokens: npt.NDArray[Any], levels: int, feedback: npt.NDArray[Any] | None = None
) -> npt.NDArray[Any]:
    """Return what the codes of tokens [tokens, heads, channels] stand for, each token with a scale of its own."""
    codes, scales = round_tokens(tokens, levels, feedback)
    numbers: npt.NDArray[Any] = scales[..., np.newaxis] * (codes.astype(np.float32) - np.float32(levels / 2))
    return numbers


WithFeedback = FeedbackMethod | FeedbackBlocks | FeedbackTrellis
"""Any method whose keys are rounded for queries."""


def feedback_methods(statistics: Sequence[Statistics], tail: Tail) -> list[WithFeedback]:
    """Return methods whose keys are rounded for the queries of another text.

    Args:
        statistics: of that text, of each layer.
        tail: which tokens stay floats.
    """
    method_list: list[WithFeedback] = []
    for whitens in (False, True):
        bases = [KeyBasis.from_statistics(layer_statistics, whitens=whitens) for layer_statistics in statistics]
        stem = "feedback, whitened" if whitens else "feedback"
        for keys, values in ((6, 6), (4, 4), (4, 3), (3, 3), (3, 2), (2, 2)):
            name = f"{stem}, int{keys} keys, int{values} values, rotated"
            method_list.append(FeedbackMethod(name, bases, keys, values, tail))
        method_list += [
            FeedbackTrellis(f"{stem}, t2, {size}, rotated", bases, T2, keeps, tail)
            for size, keeps in (("sizes kept", True), ("least error", False))
        ]
        method_list += [FeedbackBlocks(f"{stem}, blocks, int{bits}, rotated", bases, bits) for bits in (6, 4)]
        for block in (16, 64, 128):
            name = f"{stem}, blocks of {block}, int4 with residuals, rotated"
            method_list.append(FeedbackBlocks(name, bases, 4, Residuals(block)))
        name = f"{stem}, blocks of 128, int4 with residuals"
        method_list += [
            FeedbackBlocks(f"{name}, 4 first tokens, rotated", bases, 4, Residuals(128, first=4)),
            FeedbackBlocks(f"{name}, least squares, rotated", bases, 4, Residuals(128), shares=_SHARES),
            FeedbackBlocks(f"{name}, halves, rotated", bases, 4, Residuals(128), parts=2),
            FeedbackBlocks(
                f"{name}, halves, least squares, rotated", bases, 4, Residuals(128), parts=2, shares=_SHARES
            ),
        ]
    return method_list
