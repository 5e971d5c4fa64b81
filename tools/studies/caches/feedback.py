"""Keys rounded for the queries of another text, as ``quantize_kv.key_feedback`` does it: emulated by its functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graphopt.quantization.rounding.ldl import key_feedback
from graphopt.runtime_ops.kv_attention.spec.layout import (
    factors_of_tokens,
    round_page,
    round_tokens,
    round_with_feedback,
)
from tools.studies.caches.rounding import Tail, Tensor, rotation
from tools.studies.caches.spectral import Statistics

_CLIPS = {2: 0.9}
_WITH_FACTORS = (2, 3)


@dataclass(frozen=True)
class FeedbackMethod:
    """Rotated keys and values in pages; used as :class:`tools.studies.caches.rounding.Method`.

    Attributes:
        name: what it is.
        feedback: float32 [Hk, D, D] of each layer.
        key_bits: of a code of keys; 2 and 3 have factors by token, and 2 clip, as ``quantize_kv`` has it by default.
        value_bits: of a code of values.
        tail: which tokens stay floats.
    """

    name: str
    feedback: Sequence[npt.NDArray[np.float32]]
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
        clip = _CLIPS.get(self.key_bits, 1.0)
        basis = rotation(keys.shape[-1]).numpy()
        pages = [self._pages(x.numpy() @ basis) for x in (keys, values)]
        factors = factors_of_tokens(pages[0]) if self.key_bits in _WITH_FACTORS else np.ones(1, np.float32)
        codes, low, step = round_with_feedback(pages[0] / factors, self.feedback[layer], 2**self.key_bits - 1, clip)
        rounded_keys = (low[..., np.newaxis, :] + step[..., np.newaxis, :] * codes) * factors
        codes, low, step = round_page(pages[1], -1, 2**self.value_bits - 1, clip)
        rounded_values = low[..., np.newaxis] + step[..., np.newaxis] * codes
        tokens = keys.shape[1]
        flat = (x.reshape(len(x), -1, x.shape[-1])[:, :tokens] @ basis.T for x in (rounded_keys, rounded_values))
        new_keys, new_values = (torch.from_numpy(x.astype(np.float32)) for x in flat)
        return new_keys, new_values

    def _pages(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        padding = np.repeat(x[:, -1:], -x.shape[1] % self.tail.page, axis=1)
        return np.concatenate([x, padding], axis=1).reshape(len(x), -1, self.tail.page, x.shape[-1])


@dataclass(frozen=True)
class FeedbackBlocks:
    """Rotated keys and values in blocks of a server, each token with a scale of its own.

    Attributes:
        name: what it is.
        feedback: as of :class:`FeedbackMethod`.
        bits: of a code.
        tail: there is none: every token is rounded when it comes.
    """

    name: str
    feedback: Sequence[npt.NDArray[np.float32]]
    bits: int
    tail: Tail | None = None

    def apply(self, keys: Tensor, values: Tensor, rotary: Any = None, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Return keys and values [heads, tokens, channels] of a layer as this cache gives them back."""
        del rotary
        basis, levels = rotation(keys.shape[-1]).numpy(), 2**self.bits - 1
        restored = []
        for x, feedback in ((keys, self.feedback[layer]), (values, None)):
            codes, scales = round_tokens((x.numpy() @ basis).swapaxes(0, 1), levels, feedback)
            numbers = scales[..., np.newaxis] * (codes.astype(np.float32) - np.float32(levels / 2))
            restored.append(torch.from_numpy(numbers.swapaxes(0, 1) @ basis.T))
        return restored[0], restored[1]


def feedback_methods(statistics: Sequence[Statistics], tail: Tail) -> list[FeedbackMethod | FeedbackBlocks]:
    """Return methods whose keys are rounded for the queries of another text.

    Args:
        statistics: of that text, of each layer.
        tail: which tokens stay floats.
    """
    feedback = []
    for of_layer in statistics:
        basis = rotation(of_layer.queries.shape[-1])
        moments = (basis.mT @ of_layer.queries @ basis).numpy()
        feedback.append(key_feedback(moments).astype(np.float32))
    blocks = [FeedbackBlocks(f"feedback, blocks, int{bits}, rotated", feedback, bits) for bits in (6, 4)]
    pages = [
        FeedbackMethod(f"feedback, int{keys} keys, int{values} values, rotated", feedback, keys, values, tail)
        for keys, values in ((6, 6), (4, 4), (4, 3), (3, 3), (3, 2), (2, 2))
    ]
    return [*pages, *blocks]
