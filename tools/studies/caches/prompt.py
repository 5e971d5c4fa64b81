"""A prompt that a model has read, the attention of its queries, and ways in which the next tokens read it.

*Emulated* in PyTorch with float weights: the next tokens go through the model together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tools.studies.caches.rounding import Tensor

NEXT, SINKS, RECENT = 256, 64, 256
"""Tokens after the prompt, and numbers of its first and newest tokens, which are always kept."""

QUERY_STRIDE = 8
"""The attention of every 8th query of the prompt is summed."""


class Prompt:
    """A model, its cache of a prompt, and the attention of queries.

    Args:
        model: of transformers.
        ids: int64 [prompt and next tokens].
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.model, self.ids, self.length = model.eval().requires_grad_(False), ids, len(ids) - NEXT
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.attention_sums: dict[int, Tensor] = {}  # attention of the prompt's queries, summed, [heads, tokens]
        self.newest: dict[int, Tensor] = {}  # attention of its last 64 queries, [heads, tokens]
        self.late: dict[int, Tensor] = {}  # attention of every 4th of its last 512 queries, [heads, tokens]
        self.queries: dict[int, tuple[Tensor, Tensor]] = {}  # mean [Hq, D] and covariance, without positions
        self.gram: dict[int, Tensor] = {}  # of queries after the rotary embedding, [Hk, D, D]
        self.future: dict[int, Tensor] = {}  # attention of the next tokens' queries, summed, [heads, tokens]
        self.hidden: dict[int, Tensor] = {}  # what each layer's attention is made of, [tokens, size]
        self.newest_queries: dict[int, Tensor] = {}  # lengths of the last 32 queries' channels, [Hk, D]
        self.last_queries: dict[int, Tensor] = {}  # every 2nd of its last 512, scaled, [Hk, n, D]
        self.probes: dict[int, Tensor] | None = None
        self.filters: dict[int, Tensor] = {}
        self.clusters: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.way: Way | None = None
        self.take_model()
        model.config._attn_implementation = "graphopt_eviction"
        hooks = [
            layer.self_attn.register_forward_pre_hook(partial(self._note_hidden, index), with_kwargs=True)
            for index, layer in enumerate(model.model.layers)
        ]
        self.model.model(ids[None, : self.length], use_cache=False)
        for hook in hooks:
            hook.remove()

    def take_model(self) -> None:
        """Make the model compute attention by this prompt from now on."""
        ALL_ATTENTION_FUNCTIONS.register("graphopt_eviction", self._attention)

    def _note_hidden(self, layer: int, module: Any, positional: Any, keywords: dict[str, Any]) -> None:
        del module
        self.hidden[layer] = (keywords["hidden_states"] if "hidden_states" in keywords else positional[0])[0]

    def log_probabilities(self, way: Way) -> Tensor:
        """Return log probabilities after the next tokens, which read the prompt in this way."""
        self.way = way
        positions = torch.arange(self.length, len(self.ids))[None]
        output = self.model.model(self.ids[None, self.length :], position_ids=positions, use_cache=False)
        logits: Tensor = self.model.lm_head(output.last_hidden_state[0])
        return torch.log_softmax(logits.float(), -1)

    def rotate(self, x: Tensor, positions: Tensor, direction: int) -> Tensor:
        """Apply the rotary embedding to x [heads, tokens, D], or undo it."""
        cos, sin = self.model.model.rotary_emb(x, positions[None])
        first, second = x.chunk(2, -1)
        result: Tensor = x * cos + torch.cat([-second, first], -1) * sin * direction
        return result

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        del mask, kwargs
        q, k, v, layer = query[0], key[0], value[0], module.layer_idx
        group = len(q) // len(k)
        if self.way is None:
            self.cache[layer] = (k, v)
            plain = self.rotate(q, torch.arange(self.length), -1)
            deviations = plain - plain.mean(1, keepdim=True)
            self.queries[layer] = (plain.mean(1), deviations.mT @ deviations / self.length)
            rows = q.unflatten(0, (len(k), -1)).flatten(1, 2)
            self.gram[layer] = rows.mT @ rows
            positions = torch.arange(QUERY_STRIDE - 1, self.length, QUERY_STRIDE)
            self.attention_sums[layer] = _attention_sums(q, k, positions, scaling)
            self.newest_queries[layer] = q[:, -32:].unflatten(0, (len(k), -1)).norm(dim=2).norm(dim=1)
            self.newest[layer] = _attention_sums(q, k, torch.arange(self.length - 64, self.length), scaling)
            end_queries = q[:, -512::2].unflatten(0, (len(k), -1)).flatten(1, 2)
            self.last_queries[layer] = end_queries * scaling
            late = torch.arange(self.length - 512, self.length, 4)
            self.late[layer] = _attention_sums(q, k, late, scaling) / len(late)
            out = torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, scale=scaling, enable_gqa=True
            )
            return out.transpose(1, 2), None
        way, query_groups = self.way, (q * scaling).view(len(k), group, NEXT, -1)
        cache = (way.cache or self.cache)[layer]
        keys, values = (torch.cat(pair, 1) for pair in zip(cache, (k, v), strict=True))
        scores = query_groups @ keys[:, None].mT
        if way.kept_masks:
            scores[..., : self.length].masked_fill_(~way.kept_masks[layer][:, None, None], -torch.inf)
        if way.choose:
            scores[..., : self.length].masked_fill_(~way.choose(self, layer, query_groups), -torch.inf)
        scores[..., -NEXT:].masked_fill_(torch.ones(NEXT, NEXT, dtype=torch.bool).triu(1), -torch.inf)
        if way.read_extra:
            logits, rest_values = way.read_extra(layer, query_groups)
            scores, values = torch.cat([scores, logits], -1), torch.cat([values, rest_values], 1)
        weights = torch.softmax(scores, -1)
        if layer not in self.future:
            self.future[layer] = weights[..., : self.length].sum((1, 2))
        return (weights @ values[:, None]).view(len(q), NEXT, -1).transpose(0, 1)[None], None


@dataclass(frozen=True)
class Way:
    """How the next tokens read a prompt.

    Attributes:
        kept_masks: by layer, which tokens heads keep, bool [Hk, tokens]; all if ``None``.
        cache: keys and values that replace those of the prompt.
        choose: called with the prompt, a layer and queries [Hk, group, n, D], returns which tokens they read, bool
            [Hk, group or 1, n, tokens].
        read_extra: called with a layer and scaled queries, returns scores [Hk, group, n, m] and values [Hk, m, D] that
            are read besides.
        bytes: as a share of the prompt's float16 keys and values.
    """

    kept_masks: dict[int, Tensor] | None = None
    cache: dict[int, tuple[Tensor, Tensor]] | None = None
    choose: Callable[[Prompt, int, Tensor], Tensor] | None = None
    read_extra: Callable[[int, Tensor], tuple[Tensor, Tensor]] | None = None
    bytes: float = 1.0


def _attention_sums(q: Tensor, k: Tensor, positions: Tensor, scaling: float) -> Tensor:
    """Return the attention that the queries at ``positions`` give each token, summed, [Hk, tokens]."""
    sums = torch.zeros(k.shape[:2])
    for part in positions.split(128):
        scores = (q[:, part] * scaling).view(len(k), -1, len(part), k.shape[-1]) @ k[:, None].mT
        scores.masked_fill_(torch.arange(k.shape[1])[None] > part[:, None], -torch.inf)
        sums += torch.softmax(scores, -1).sum((1, 2))
    return sums
