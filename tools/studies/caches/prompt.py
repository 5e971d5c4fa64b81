"""A prompt that a model has read, what its queries attended to, and ways in which the next tokens may read it.

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
"""Tokens behind the prompt, and those of it that always stay: the first, and the newest."""

ASKED = 8
"""Every so many queries of the prompt add up their attention."""


class Prompt:
    """A model, what it stored of a prompt, and what queries attended to.

    Args:
        model: of transformers.
        ids: int64 [prompt and next tokens].
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.model, self.ids, self.length = model.eval().requires_grad_(False), ids, len(ids) - NEXT
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.received: dict[int, Tensor] = {}  # attention of the prompt's queries, summed, [heads, tokens]
        self.newest: dict[int, Tensor] = {}  # attention of its last 64 queries, [heads, tokens]
        self.late: dict[int, Tensor] = {}  # attention of every 4th of its last 512 queries, [heads, tokens]
        self.queries: dict[int, tuple[Tensor, Tensor]] = {}  # mean [Hq, D] and covariance, without positions
        self.gram: dict[int, Tensor] = {}  # of queries behind the rotary embedding, [Hk, D, D]
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
        """Let the model's attention be that of this prompt, from now on."""
        ALL_ATTENTION_FUNCTIONS.register("graphopt_eviction", self._attention)

    def _note_hidden(self, layer: int, module: Any, positional: Any, named: dict[str, Any]) -> None:
        del module
        self.hidden[layer] = (named["hidden_states"] if "hidden_states" in named else positional[0])[0]

    def log_probabilities(self, way: Way) -> Tensor:
        """Return those behind the next tokens where they read the prompt in this way."""
        self.way = way
        positions = torch.arange(self.length, len(self.ids))[None]
        output = self.model.model(self.ids[None, self.length :], position_ids=positions, use_cache=False)
        logits: Tensor = self.model.lm_head(output.last_hidden_state[0])
        return torch.log_softmax(logits.float(), -1)

    def rotate(self, x: Tensor, positions: Tensor, direction: int) -> Tensor:
        """Embed positions in x [heads, tokens, D], or take them off again."""
        cos, sin = self.model.model.rotary_emb(x, positions[None])
        first, second = x.chunk(2, -1)
        turned: Tensor = x * cos + torch.cat([-second, first], -1) * sin * direction
        return turned

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **others: Any
    ) -> tuple[Tensor, None]:
        del mask, others
        q, k, v, layer = query[0], key[0], value[0], module.layer_idx
        group = len(q) // len(k)
        if self.way is None:
            self.cache[layer] = (k, v)
            plain = self.rotate(q, torch.arange(self.length), -1)
            centred = plain - plain.mean(1, keepdim=True)
            self.queries[layer] = (plain.mean(1), centred.mT @ centred / self.length)
            rows = q.unflatten(0, (len(k), -1)).flatten(1, 2)
            self.gram[layer] = rows.mT @ rows
            asked = torch.arange(ASKED - 1, self.length, ASKED)
            self.received[layer] = _received(q, k, asked, scaling)
            self.newest_queries[layer] = q[:, -32:].unflatten(0, (len(k), -1)).norm(dim=2).norm(dim=1)
            self.newest[layer] = _received(q, k, torch.arange(self.length - 64, self.length), scaling)
            of_end = q[:, -512::2].unflatten(0, (len(k), -1)).flatten(1, 2)
            self.last_queries[layer] = of_end * scaling
            late = torch.arange(self.length - 512, self.length, 4)
            self.late[layer] = _received(q, k, late, scaling) / len(late)
            out = torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, scale=scaling, enable_gqa=True
            )
            return out.transpose(1, 2), None
        way, query_groups = self.way, (q * scaling).view(len(k), group, NEXT, -1)
        stored = (way.cache or self.cache)[layer]
        keys, values = (torch.cat(pair, 1) for pair in zip(stored, (k, v), strict=True))
        scores = query_groups @ keys[:, None].mT
        if way.kept:
            scores[..., : self.length].masked_fill_(~way.kept[layer][:, None, None], -torch.inf)
        if way.choose:
            scores[..., : self.length].masked_fill_(~way.choose(self, layer, query_groups), -torch.inf)
        scores[..., -NEXT:].masked_fill_(torch.ones(NEXT, NEXT, dtype=torch.bool).triu(1), -torch.inf)
        if way.rest:
            logits, rest_values = way.rest(layer, query_groups)
            scores, values = torch.cat([scores, logits], -1), torch.cat([values, rest_values], 1)
        weights = torch.softmax(scores, -1)
        if layer not in self.future:
            self.future[layer] = weights[..., : self.length].sum((1, 2))
        return (weights @ values[:, None]).view(len(q), NEXT, -1).transpose(0, 1)[None], None


@dataclass(frozen=True)
class Way:
    """How the next tokens read a prompt.

    Attributes:
        kept: by layer, which tokens heads keep, bool [Hk, tokens]; all where there is none.
        cache: keys and values instead of those of the prompt.
        choose: called with the prompt, a layer and queries [Hk, group, n, D], returns which tokens they read, bool
            [Hk, group or 1, n, tokens].
        rest: called with a layer and scaled queries, returns what is read besides: scores [Hk, group, n, m] and values
            [Hk, m, D].
        bytes: of those of the prompt's float16 keys and values.
    """

    kept: dict[int, Tensor] | None = None
    cache: dict[int, tuple[Tensor, Tensor]] | None = None
    choose: Callable[[Prompt, int, Tensor], Tensor] | None = None
    rest: Callable[[int, Tensor], tuple[Tensor, Tensor]] | None = None
    bytes: float = 1.0


def _received(q: Tensor, k: Tensor, asked: Tensor, scaling: float) -> Tensor:
    """Return the attention that the queries at ``asked`` give each token, summed, [Hk, tokens]."""
    received = torch.zeros(k.shape[:2])
    for part in asked.split(128):
        scores = (q[:, part] * scaling).view(len(k), -1, len(part), k.shape[-1]) @ k[:, None].mT
        scores.masked_fill_(torch.arange(k.shape[1])[None] > part[:, None], -torch.inf)
        received += torch.softmax(scores, -1).sum((1, 2))
    return received
