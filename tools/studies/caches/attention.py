"""A model of transformers whose attention reads keys and values as a rounding cache returns them.

Each token reads what it would read if tokens came one by one: pages that have left the tail are rounded, all others are
floats. So all tokens of a piece can go through the model at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphopt.models.gguf.checkpoint import load_gguf
from tools.studies.caches.feedback import WithFeedback
from tools.studies.caches.rounding import Method, Residuals, Tail, Tensor
from tools.studies.caches.spectral import SpectralMethod, Statistics

_ROWS = 256  # queries at a time


class RoundedModel:
    """A causal language model, the keys and values of a prefix that it has read as floats, and one way to round them.

    Args:
        checkpoint: a ``.gguf`` file or a Hugging Face folder.
        ids: int64 [tokens], the text.
        scored_tokens: the last tokens of it are fed again under each method.
    """

    def __init__(self, checkpoint: Path, ids: Tensor, scored_tokens: int) -> None:
        if checkpoint.suffix == ".gguf":
            self.model = load_gguf(checkpoint)[0].eval()
        else:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32).eval()
        self.model.requires_grad_(False)
        ALL_ATTENTION_FUNCTIONS.register("graphopt_rounded_cache", self._attention)
        self.model.config._attn_implementation = "graphopt_rounded_cache"
        self.ids, self.scored_tokens = ids, scored_tokens
        self.prefix: dict[int, tuple[Tensor, Tensor]] = {}
        self._method: Method | SpectralMethod | WithFeedback | None = None
        self._statistics: dict[int, Statistics] | None = None
        self._keeps = True
        self.reference = self._log_probabilities(0)
        self._keeps = False
        self.prefix = {
            layer: (k[:, :-scored_tokens].clone(), v[:, :-scored_tokens].clone())
            for layer, (k, v) in self.prefix.items()
        }

    def statistics(self, ids: Tensor) -> list[Statistics]:
        """Return the statistics of another text, by layer.

        Args:
            ids: int64 [tokens].
        """
        self._statistics = {}
        self.model.model(ids[None], use_cache=False)
        by_layer, self._statistics = self._statistics, None
        return [by_layer[layer] for layer in sorted(by_layer)]

    def log_probabilities(self, method: Method | SpectralMethod | WithFeedback) -> Tensor:
        """Return the log probabilities after each scored token, float32 [scored tokens, vocabulary]."""
        self._method = method
        return self._log_probabilities(len(self.ids) - self.scored_tokens)

    def _log_probabilities(self, first: int) -> Tensor:
        positions = torch.arange(first, len(self.ids))[None]
        hidden = self.model.model(self.ids[None, first:], position_ids=positions, use_cache=False).last_hidden_state
        logits: Tensor = self.model.lm_head(hidden[0, -self.scored_tokens :])
        return torch.log_softmax(logits.float(), -1)

    def _rotary(self, keys: Tensor, direction: int) -> Tensor:
        """Apply the rotary embedding to keys [heads, tokens, channels], or undo it: the halves are pairs."""
        positions = torch.arange(keys.shape[1])[None]
        cos, sin = self.model.model.rotary_emb(keys, positions)
        first, second = keys.chunk(2, -1)
        result: Tensor = keys * cos + torch.cat([-second, first], -1) * sin * direction
        return result

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        del mask, kwargs
        q, k, v = query[0], key[0], value[0]
        if self._statistics is not None:
            self._statistics[module.layer_idx] = Statistics.from_text(q * scaling, k, v, module.o_proj.weight)
            return _whole(q, k, v, scaling), None
        if self._keeps:
            self.prefix[module.layer_idx] = (k, v)
        elif self.prefix:
            k, v = (torch.cat(pair, 1) for pair in zip(self.prefix[module.layer_idx], (k, v), strict=True))
        if self._method is None and not self.prefix:
            return _whole(q, k, v, scaling), None
        rounded_cache = (k, v) if self._method is None else self._method.apply(k, v, self._rotary, module.layer_idx)
        tail = None if self._method is None else self._method.tail
        group, out = q.shape[0] // k.shape[0], torch.empty_like(q)
        for head in range(k.shape[0]):
            heads = slice(head * group, (head + 1) * group)
            # the tail is read from floats, or from the sums of both codes
            numbers = [tensor[head] for tensor in (*rounded_cache, k, v)[:4]]
            for begin in range(0, q.shape[1], _ROWS):
                rows = slice(begin, begin + _ROWS)
                end = k.shape[1] - q.shape[1] + min(begin + _ROWS, q.shape[1])
                positions = torch.arange(end - q[0, rows].shape[0], end)
                outputs = _attend(q[heads, rows] * scaling, [tensor[:end] for tensor in numbers], positions, tail)
                out[heads, rows] = outputs
        return out.transpose(0, 1)[None], None


def _whole(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Return causal attention over a text that is all new, [1, tokens, heads, channels]."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q[None], k[None], v[None], is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2)


def _attend(q: Tensor, numbers: list[Tensor], positions: Tensor, tail: Tail | Residuals | None) -> Tensor:
    """Return attention of queries [group, rows, channels] at ``positions``; ``numbers``: K, V rounded, in the tail."""
    keys, values, float_keys, float_values = numbers
    tokens, p = torch.arange(keys.shape[0])[None], positions[:, None]
    scores = q @ keys.mT
    is_stored = None
    if tail is not None:
        is_stored = tail.are_rounded(tokens, p)
        scores = torch.where(is_stored, scores, q @ float_keys.mT)
    weights = torch.softmax(scores.masked_fill_(tokens > p, -torch.inf), -1)
    if is_stored is None:
        return weights @ values
    return (weights * is_stored) @ values + (weights * ~is_stored) @ float_values
