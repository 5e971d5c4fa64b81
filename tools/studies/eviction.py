"""Compare scores by which tokens of a cache are evicted: KL of the tokens behind a prompt, beside the whole cache.

    python tools/studies/eviction.py                                    # SmolLM2, 7936 tokens; `make real` fetches it
    python tools/studies/eviction.py --share 0.5 --only streaming --only keydiff
    python tools/studies/eviction.py --only 'all, *'                    # caches that keep less of each token
    python tools/studies/eviction.py --only 'read, *'                   # pages that each query chooses of the whole

*Emulated* in PyTorch with float weights: the prompt is read densely, then each KV head keeps the same number of tokens,
the first 64 and the newest 256 among them, and the next 256 tokens of the text read what is left and one another. So
all methods take the same bytes, and so do those whose heads share the tokens of a layer. Queries of the prompt are at
hand for those scores that need some. ``next queries`` are those that come, which nobody knows: a bound, no method.

Methods that begin with "all" keep all tokens, and less of each; bytes are beside those of float16 keys and values.
Those that begin with "read" keep the whole cache, of which each query reads pages of 16 with ``--read`` tokens.
"""

from __future__ import annotations

import fnmatch
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.models.gguf.checkpoint import load_gguf
from tools.bench.parts.options import JsonFile
from tools.studies.cache_quality import python_documentation
from tools.studies.caches.rounding import CHANNELS, TOKENS, Tensor, asymmetric, normal_levels, rotation
from tools.studies.real.models import fetch

NEXT, SINKS, RECENT = 256, 64, 256
PAGE = 16
ASKED = 8
"""Every so many queries of the prompt add up their attention."""


class Prompt:
    """A model, what it stored of a prompt, and what queries attended to.

    Args:
        model: of transformers.
        ids: int64 [prompt and next tokens].
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        torch.set_grad_enabled(False)
        self.model, self.ids, self.length = model.eval(), ids, len(ids) - NEXT
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.received: dict[int, Tensor] = {}  # attention of the prompt's queries, summed, [heads, tokens]
        self.newest: dict[int, Tensor] = {}  # attention of its last 64 queries, [heads, tokens]
        self.queries: dict[int, tuple[Tensor, Tensor]] = {}  # mean [Hq, D] and covariance, without positions
        self.gram: dict[int, Tensor] = {}  # of queries behind the rotary embedding, [Hk, D, D]
        self.future: dict[int, Tensor] = {}  # attention of the next tokens' queries, summed, [heads, tokens]
        self.hidden: dict[int, Tensor] = {}  # what each layer's attention is made of, [tokens, size]
        self.newest_queries: dict[int, Tensor] = {}  # lengths of the last 32 queries' channels, [Hk, D]
        self.probes: dict[int, Tensor] | None = None
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
        bytes: of those of the prompt's float16 keys and values.
    """

    kept: dict[int, Tensor] | None = None
    cache: dict[int, tuple[Tensor, Tensor]] | None = None
    choose: Callable[[Prompt, int, Tensor], Tensor] | None = None
    bytes: float = 1.0


def _received(q: Tensor, k: Tensor, asked: Tensor, scaling: float) -> Tensor:
    """Return the attention that the queries at ``asked`` give each token, summed, [Hk, tokens]."""
    received = torch.zeros(k.shape[:2])
    for part in asked.split(128):
        scores = (q[:, part] * scaling).view(len(k), -1, len(part), k.shape[-1]) @ k[:, None].mT
        scores.masked_fill_(torch.arange(k.shape[1])[None] > part[:, None], -torch.inf)
        received += torch.softmax(scores, -1).sum((1, 2))
    return received


def streaming(prompt: Prompt, layer: int) -> Tensor:
    """The newest tokens (StreamingLLM, Xiao et al. 2024)."""
    heads = len(prompt.cache[layer][0])
    return torch.arange(prompt.length, dtype=torch.float32).expand(heads, -1)


def key_norm(prompt: Prompt, layer: int) -> Tensor:
    """Short keys (Devoto et al. 2024)."""
    scores: Tensor = -prompt.cache[layer][0].norm(dim=-1)
    return scores


def keydiff(prompt: Prompt, layer: int) -> Tensor:
    """Keys unlike the mean direction of all keys (KeyDiff, Park et al. 2025)."""
    keys = torch.nn.functional.normalize(prompt.cache[layer][0], dim=-1)
    return -(keys * torch.nn.functional.normalize(keys.mean(1, keepdim=True), dim=-1)).sum(-1)


def snapkv(prompt: Prompt, layer: int) -> Tensor:
    """Attention of the last 64 queries, the largest of 7 neighbours (SnapKV, Li et al. 2024)."""
    return torch.nn.functional.max_pool1d(prompt.newest[layer][None], 7, 1, 3)[0]


def accumulated(prompt: Prompt, layer: int) -> Tensor:
    """Attention of all queries, here of every 8th, added up (H2O, Zhang et al. 2023)."""
    return prompt.received[layer]


def mean_received(prompt: Prompt, layer: int) -> Tensor:
    """The same, per query that could have seen the token."""
    return prompt.received[layer] / (prompt.length - torch.arange(prompt.length)).clamp(min=64)


def expected_attention(prompt: Prompt, layer: int) -> Tensor:
    """E[exp(q k)] |v| for normal queries at the next 512 positions (Devoto et al. 2025), the mean over the heads."""
    keys, values = prompt.cache[layer]
    mean, covariance = prompt.queries[layer]
    size, group = keys.shape[-1], len(mean) // len(keys)
    positions = torch.arange(prompt.length, prompt.length + 512)
    unit = torch.eye(size).expand(512, -1, -1).transpose(0, 1)  # [D, 512, D]
    turn = prompt.rotate(unit, positions, 1).mean(1)  # of rows, averaged
    mean, covariance = mean @ turn, turn.mT @ covariance @ turn
    found = []
    for head, k in enumerate(keys):
        rows = slice(head * group, (head + 1) * group)
        linear = k @ mean[rows].mT / size**0.5
        square = torch.einsum("tc,hcd,td->th", k, covariance[rows], k) / (2 * size)
        found.append(torch.softmax(linear + square, 0).mean(-1))
    scores: Tensor = torch.stack(found) * values.norm(dim=-1)
    return scores


def next_queries(prompt: Prompt, layer: int) -> Tensor:
    """Attention of the queries that come: a bound, no method."""
    return prompt.future[layer]


def probe(prompt: Prompt, layer: int) -> Tensor:
    """A linear score of hidden states, learned on another text (KVzap, Jegou et al. 2026)."""
    if prompt.probes is None:
        raise AssertionError("probes are learned first")
    weights = prompt.probes[layer]
    hidden = torch.nn.functional.pad(prompt.hidden[layer], (0, 1), value=1.0)
    return (hidden @ weights).mT


def learn_probes(model: Any, ids: Tensor) -> dict[int, Tensor]:
    """Return, by layer, weights [size + 1, Hk] that tell log(attention of later queries) by a token's hidden state."""
    text, probes = Prompt(model, ids), {}
    for layer, hidden in text.hidden.items():
        inputs = torch.nn.functional.pad(hidden, (0, 1), value=1.0)[SINKS:-RECENT].double()
        goal = mean_received(text, layer)[:, SINKS:-RECENT].clamp_min(1e-9).log().double().mT
        gram = inputs.mT @ inputs
        ridge = 1e-3 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
        probes[layer] = torch.linalg.solve(gram + ridge, inputs.mT @ goal).float()
    return probes


METHODS: dict[str, Callable[[Prompt, int], Tensor]] = {
    "streaming": streaming,
    "key norm": key_norm,
    "keydiff": keydiff,
    "snapkv": snapkv,
    "accumulated attention": accumulated,
    "mean attention": mean_received,
    "expected attention": expected_attention,
    "kvzap": probe,
    "next queries": next_queries,
}


def kept_tokens(scores: Tensor, count: int, *, is_shared: bool = False) -> Tensor:
    """Return which tokens heads keep, bool [Hk, tokens]: the first, the newest and the best.

    Args:
        scores: [Hk, tokens].
        count: of a head, on average where heads share them (Ada-KV, Feng et al. 2024).
        is_shared: whether a head may keep more than another.
    """
    scores = scores.clone()
    scores[:, :SINKS] = scores[:, -RECENT:] = torch.inf
    if is_shared:
        return (
            torch.zeros(scores.numel(), dtype=torch.bool)
            .index_fill_(0, scores.flatten().topk(count * len(scores)).indices, True)
            .view(scores.shape)
        )
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(count, dim=-1).indices, True)


def merged(prompt: Prompt, count: int) -> Way:
    """Tokens that go are averaged into the kept one whose key is most like theirs, above a cosine of 0.6 (EMS)."""
    kept, cache = {}, {}
    for layer, (keys, values) in prompt.cache.items():
        scores = snapkv(prompt, layer) * mean_received(prompt, layer)  # of the newest queries, and of all
        kept[layer] = kept_tokens(scores, count)
        new_keys, new_values = keys.clone(), values.clone()
        for head, is_kept in enumerate(kept[layer]):
            places = is_kept.nonzero()[SINKS:, 0]  # the first stay as they are
            unit = torch.nn.functional.normalize(keys[head], dim=-1)
            likeness, nearest = (unit[~is_kept] @ unit[places].mT).max(1)
            joins = likeness > 0.6
            weight, own = scores[head][~is_kept][joins, None], scores[head][places, None]
            total = own.index_add(0, nearest[joins], weight).clamp_min(1e-20)
            for numbers, new in ((keys[head], new_keys[head]), (values[head], new_values[head])):
                sums = (own * numbers[places]).index_add(0, nearest[joins], weight * numbers[~is_kept][joins])
                new[places] = sums / total
        cache[layer] = (new_keys, new_values)
    return Way(kept, cache, bytes=count / prompt.length)


def of_classes(prompt: Prompt, saliency: Callable[[Prompt, int], Tensor], share: float) -> Way:
    """Tokens of the largest saliency are rounded to 4 bits, others to 2; rotated, in pages (MiKV, ZipCache)."""
    cache = {}
    for layer, (keys, values) in prompt.cache.items():
        is_large = kept_tokens(saliency(prompt, layer), round(prompt.length * share))[..., None]
        numbers = []
        for index, original in enumerate((keys, values)):
            rotated = original @ rotation(original.shape[-1])
            parts = [_in_pages(rotated, bits, (TOKENS, CHANNELS)[index]) for bits in (4, 2)]
            rounded: Tensor = torch.where(is_large, parts[0], parts[1]) @ rotation(original.shape[-1]).mT
            rounded[:, :64], rounded[:, -128:] = original[:, :64], original[:, -128:]
            numbers.append(rounded)
        cache[layer] = (numbers[0], numbers[1])
    return Way(cache=cache, bytes=(4 * share + 2 * (1 - share) + 1) / 16)


def _in_pages(x: Tensor, bits: int, axis: int) -> Tensor:
    pages = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 64)).unflatten(1, (-1, 64))
    return asymmetric(pages, axis, bits).flatten(1, 2)[:, : x.shape[1]]


def fewer_key_channels(prompt: Prompt, share: float) -> Way:
    """Channels of keys that the newest queries use least are dropped, of all but the newest tokens (ThinK)."""
    cache = {}
    for layer, (keys, values) in prompt.cache.items():
        norms = prompt.newest_queries[layer] * keys[:, :-32].norm(dim=1)
        stays = torch.zeros_like(norms).scatter_(1, norms.topk(round(share * norms.shape[1])).indices, 1.0)
        cache[layer] = (torch.cat([keys[:, :-32] * stays[:, None], keys[:, -32:]], 1), values)
    return Way(cache=cache, bytes=(share + 1) / 2)


def rounded(prompt: Prompt, round_layer: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]], bits: float) -> Way:
    """Keys and values of each layer rounded; the first page and the newest two stay floats."""
    cache = {}
    for layer, (keys, values) in prompt.cache.items():
        pair = round_layer(layer, keys, values)
        for new, old in zip(pair, (keys, values), strict=True):
            new[:, :64], new[:, -128:] = old[:, :64], old[:, -128:]
        cache[layer] = pair
    return Way(cache=cache, bytes=bits / 16)


def without_tail(prompt: Prompt, prefix: int) -> Way:
    """Each token rounded to 4 bits by itself, but the first ones (QFeP)."""
    cache = {layer: prefixed(layer, *pair, bits=4, prefix=prefix) for layer, pair in prompt.cache.items()}
    return Way(cache=cache, bytes=4.5 / 16)


def _levels(x: Tensor, bits: int) -> Tensor:
    """Round each token to Lloyd's and Max's levels of a normal distribution, times the root of its mean square."""
    size, levels = x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-20), normal_levels(bits)
    rounded_levels: Tensor = levels[torch.bucketize(x / size, (levels[1:] + levels[:-1]) / 2)] * size
    return rounded_levels


def _sketch(x: Tensor, rows: int, seed: int = 0) -> Tensor:
    """Return what signs of ``rows`` random products and the length of x say of it: unbiased in products (QJL)."""
    matrix = torch.randn(x.shape[-1], rows, generator=torch.Generator().manual_seed(seed))
    signs = (x @ matrix).sign()
    estimate: Tensor = x.norm(dim=-1, keepdim=True) * (torch.pi / 2) ** 0.5 / rows * (signs @ matrix.mT)
    return estimate


def turboquant(layer: int, keys: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Rotated, levels of a bit less and a sketch of what is left of keys; levels of all bits of values (TurboQuant)."""
    del layer
    basis = rotation(keys.shape[-1])
    turned, turned_values = keys @ basis, values @ basis
    low = _levels(turned, bits - 1)
    return (low + _sketch(turned - low, keys.shape[-1])) @ basis.mT, _levels(turned_values, bits) @ basis.mT


def qjl(layer: int, keys: Tensor, values: Tensor, rows: int, bits: int) -> tuple[Tensor, Tensor]:
    """Signs of random products of keys, values per token (QJL, Zandieh et al. 2024)."""
    del layer
    return _sketch(keys, rows), asymmetric(values, CHANNELS, bits)


def smooth_attention(layer: int, keys: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Channels of keys divided by the root of their largest number, pairs of the rotary embedding alike (QServe)."""
    del layer
    half = keys.shape[-1] // 2
    largest = keys.abs().amax(1, keepdim=True)
    pair = torch.maximum(largest[..., :half], largest[..., half:]).sqrt().clamp_min(1e-6)
    factors = torch.cat([pair, pair], -1)
    return asymmetric(keys / factors, CHANNELS, bits) * factors, asymmetric(values, CHANNELS, bits)


def prefixed(layer: int, keys: Tensor, values: Tensor, bits: int, prefix: int) -> tuple[Tensor, Tensor]:
    """Each token by itself, the first ones as floats (QFeP's prefix takes the spikes)."""
    del layer
    pair = asymmetric(keys, CHANNELS, bits), asymmetric(values, CHANNELS, bits)
    for new, old in zip(pair, (keys, values), strict=True):
        new[:, :prefix] = old[:, :prefix]
    return pair


def spectral(layer: int, keys: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Coordinates along eigenvectors, more bits where they vary more; in pages, a step per channel."""
    del layer
    pair = []
    for x in (keys, values):
        mean = x.mean(1, keepdim=True)
        variance, basis = torch.linalg.eigh((x - mean).mT @ (x - mean) / x.shape[1])
        wanted = 0.5 * variance.clamp_min(1e-12).log2()
        wanted = (wanted - wanted.mean(-1, keepdim=True) + bits).round().clamp(0, 8)
        turned = (x - mean) @ basis
        parts = [torch.zeros_like(turned), *(_in_pages(turned, width, TOKENS) for width in range(1, 9))]
        chosen = torch.stack(parts).gather(0, wanted.long()[None, :, None].expand(1, *turned.shape))[0]
        pair.append(chosen @ basis.mT + mean)
    return pair[0], pair[1]


def oscar(prompt: Prompt, layer: int, keys: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Keys along eigenvectors of the queries, mixed by Hadamard and clipped, per token; values by theirs (OSCAR)."""
    of_queries = prompt.gram[layer]
    weights = torch.einsum("htc,hcd,htd->ht", keys, of_queries, keys)
    pair = []
    for x, gram in ((keys, of_queries), (values, (values * weights[..., None]).mT @ values)):
        basis = torch.linalg.eigh(gram).eigenvectors @ rotation(x.shape[-1])
        pair.append(asymmetric(x @ basis, CHANNELS, bits, clip=0.9) @ basis.mT)
    return pair[0], pair[1]


def by_indexer(channels: int, budget: int) -> Way:
    """Tokens of the best scores by few channels of queries and keys, those that tell most of the products.

    Fitted in closed form to the queries and keys of the prompt: the part of that rank that is nearest to all scores.
    """

    def choose(prompt: Prompt, layer: int, queries: Tensor) -> Tensor:
        keys = prompt.cache[layer][0]
        values, vectors = torch.linalg.eigh(keys.mT @ keys)
        root = vectors * values.clamp_min(1e-6).sqrt()[:, None] @ vectors.mT
        inverse = vectors * values.clamp_min(1e-6).rsqrt()[:, None] @ vectors.mT
        best = torch.linalg.eigh(root @ prompt.gram[layer] @ root).eigenvectors[..., -channels:]
        short_queries, short_keys = queries @ (root @ best)[:, None], keys @ (inverse @ best)
        scores = (short_queries @ short_keys[:, None].mT).softmax(-1).mean(1, keepdim=True)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(budget, -1).indices, True)
        chosen[..., :SINKS] = chosen[..., -RECENT:] = True
        return chosen

    return Way(choose=choose)


def low_rank_keys(prompt: Prompt, rank: int, value_rank: int | None = None) -> Way:
    """Keys before the rotary embedding of a rank, all heads of a layer together (ShadowKV); values too (CSKV)."""
    cache, positions = {}, torch.arange(prompt.length)
    for layer, (keys, values) in prompt.cache.items():
        plain = _of_rank(prompt.rotate(keys, positions, -1), rank)
        low = prompt.rotate(plain, positions, 1)
        low[:, -RECENT:] = keys[:, -RECENT:]
        low_values = values if value_rank is None else _of_rank(values, value_rank)
        if value_rank is not None:
            low_values[:, -RECENT:] = values[:, -RECENT:]
        cache[layer] = (low, low_values)
    size = keys.shape[0] * keys.shape[-1]
    return Way(cache=cache, bytes=(rank / size + (1 if value_rank is None else value_rank / size)) / 2)


def _of_rank(x: Tensor, rank: int) -> Tensor:
    rows = x.transpose(0, 1).flatten(1)
    basis = torch.linalg.eigh(rows.mT @ rows).eigenvectors[:, -rank:]
    projected: Tensor = (rows @ basis @ basis.mT).unflatten(1, (len(x), -1)).transpose(0, 1).contiguous()
    return projected


def shared_layers(prompt: Prompt, retained: float) -> Way:
    """Two neighbours of the deeper layers share directions, each with its lengths; others stay (MiniCache)."""
    cache = dict(prompt.cache)
    for layer in range(len(cache) // 2, len(cache) - 1, 2):
        pair = [prompt.cache[layer], prompt.cache[layer + 1]]
        both: list[list[Tensor]] = [[], []]
        for index in (0, 1):
            units = [torch.nn.functional.normalize(each[index], dim=-1) for each in pair]
            angle = (units[0] * units[1]).sum(-1, keepdim=True).clamp(-1 + 1e-6, 1 - 1e-6).acos()
            middle = (units[0] + units[1]) * ((angle / 2).sin() / angle.sin())
            differs = kept_tokens(angle[..., 0], max(SINKS + RECENT, round(retained * prompt.length)))[..., None]
            for which, states in enumerate(pair):
                shared = middle * states[index].norm(dim=-1, keepdim=True)
                both[which].append(torch.where(differs, states[index], shared))
        cache[layer], cache[layer + 1] = (both[0][0], both[0][1]), (both[1][0], both[1][1])
    return Way(cache=cache, bytes=0.75 + retained / 4)


def choose_pages(score: Callable[[Prompt, int, Tensor], Tensor], budget: int) -> Way:
    """Each query reads the pages of the best scores, besides the first and the newest tokens."""

    def choose(prompt: Prompt, layer: int, queries: Tensor) -> Tensor:
        scores = score(prompt, layer, queries)  # [Hk, group, n, pages]
        scores = scores.softmax(-1).mean(1, keepdim=True)  # of all query heads, as KVAttention has it
        best = scores.topk(budget // PAGE, dim=-1).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True).repeat_interleave(PAGE, -1)
        chosen[..., :SINKS] = chosen[..., -RECENT:] = True
        return chosen

    return Way(choose=choose)


def _pages(x: Tensor) -> Tensor:
    pages: Tensor = x.unflatten(1, (-1, PAGE))
    return pages


def by_mean(prompt: Prompt, layer: int, queries: Tensor) -> Tensor:
    """The mean of a page's keys (TriForce)."""
    scores: Tensor = queries @ _pages(prompt.cache[layer][0]).mean(2)[:, None].mT
    return scores


def by_bounds(prompt: Prompt, layer: int, queries: Tensor) -> Tensor:
    """The most that a key between the least and largest numbers of a page can have (Quest)."""
    pages = _pages(prompt.cache[layer][0])
    low, high = pages.amin(2), pages.amax(2)
    return queries.clamp_min(0) @ high[:, None].mT + queries.clamp_max(0) @ low[:, None].mT


def by_representatives(prompt: Prompt, layer: int, queries: Tensor) -> Tensor:
    """The keys of the 4 tokens of a page that later queries attend to most, added up (InfLLM)."""
    pages, best = _pages(prompt.cache[layer][0]), _pages(mean_received(prompt, layer)[..., None]).topk(4, dim=2).indices
    sums = pages.gather(2, best.expand(-1, -1, -1, pages.shape[-1])).sum(2)
    scores: Tensor = queries @ sums[:, None].mT
    return scores


def by_best_key(prompt: Prompt, layer: int, queries: Tensor) -> Tensor:
    """The largest score of a page's keys: a bound, no method."""
    scores: Tensor = (queries @ prompt.cache[layer][0][:, None].mT).unflatten(-1, (-1, PAGE)).amax(-1)
    return scores


def by_centroids(budget: int) -> Way:
    """Tokens of those clusters of keys whose centroids have the best scores (Squeezed Attention), no pages."""

    def choose(prompt: Prompt, layer: int, queries: Tensor) -> Tensor:
        if layer not in prompt.clusters:
            prompt.clusters[layer] = [_clusters(k, prompt.length // 20) for k in prompt.cache[layer][0]]
        masks = []
        for head, (centroids, cluster) in enumerate(prompt.clusters[layer]):
            scores = (queries[head] @ centroids.mT).softmax(-1).mean(0)  # [n, clusters]
            order = scores.argsort(-1, descending=True)
            sizes = torch.bincount(cluster, minlength=len(centroids))[order]
            is_read = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, sizes.cumsum(-1) <= budget)
            masks.append(is_read[:, cluster])
        chosen = torch.stack(masks)[:, None]
        chosen[..., :SINKS] = chosen[..., -RECENT:] = True
        return chosen

    return Way(choose=choose)


def _clusters(keys: Tensor, count: int, rounds: int = 5) -> tuple[Tensor, Tensor]:
    """Return centroids [count, D] by k-means of directions, and the cluster of each key [tokens]."""
    unit = torch.nn.functional.normalize(keys, dim=-1)
    centroids = unit[torch.linspace(0, len(keys) - 1, count).long()]
    cluster = torch.zeros(len(keys), dtype=torch.long)
    for _ in range(rounds):
        cluster = (unit @ centroids.mT).argmax(1)
        sums = torch.zeros_like(centroids).index_add_(0, cluster, unit)
        centroids = torch.nn.functional.normalize(sums, dim=-1)
    sizes = torch.bincount(cluster, minlength=count).clamp_min(1)[:, None]
    return torch.zeros_like(centroids).index_add_(0, cluster, keys) / sizes, cluster


def ways(prompt: Prompt, share: float, budget: int) -> dict[str, Callable[[], Way]]:
    """Return all methods by their names."""
    count = round(prompt.length * share)

    def evicted(score: Callable[[Prompt, int], Tensor], *, is_shared: bool) -> Way:
        return Way(
            {layer: kept_tokens(score(prompt, layer), count, is_shared=is_shared) for layer in prompt.cache},
            bytes=share,
        )

    found: dict[str, Callable[[], Way]] = {}
    found |= {name: partial(evicted, score, is_shared=False) for name, score in METHODS.items()}
    for name in ("snapkv", "mean attention", "kvzap", "next queries"):
        found[f"{name}, heads share"] = partial(evicted, METHODS[name], is_shared=True)
    found["merged (EMS)"] = partial(merged, prompt, count)
    for name, saliency in (("MiKV", accumulated), ("ZipCache", mean_received)):
        found[f"all, {name}: a quarter in 4 bits, others in 2"] = partial(of_classes, prompt, saliency, 0.25)
    for part in (0.8, 0.6):
        found[f"all, ThinK: {part:.0%} of key channels"] = partial(fewer_key_channels, prompt, part)
    for rank in (96, 48):
        found[f"all, ShadowKV: keys of rank {rank} of 192"] = partial(low_rank_keys, prompt, rank)
    found["all, CSKV: keys and values of rank 96 of 192"] = partial(low_rank_keys, prompt, 96, 96)
    found["all, MiniCache: deeper layers in pairs, 5% of tokens apart"] = partial(shared_layers, prompt, 0.05)
    for name, score in (
        ("mean", by_mean),
        ("bounds (Quest)", by_bounds),
        ("4 representatives (InfLLM)", by_representatives),
        ("best key", by_best_key),
    ):
        found[f"read, {name}"] = partial(choose_pages, score, budget)
    for bits in (4, 2):
        found[f"all, TurboQuant, {bits} bits"] = partial(rounded, prompt, partial(turboquant, bits=bits), bits + 0.375)
        found[f"all, SmoothAttention, {bits} bits per token"] = partial(
            rounded, prompt, partial(smooth_attention, bits=bits), bits + 0.5
        )
        found[f"all, {bits} bits per token"] = partial(
            rounded, prompt, partial(prefixed, bits=bits, prefix=0), bits + 0.5
        )
        found[f"all, spectral, {bits} bits"] = partial(rounded, prompt, partial(spectral, bits=bits), bits + 0.5)
        found[f"all, OSCAR, {bits} bits"] = partial(rounded, prompt, partial(oscar, prompt, bits=bits), bits + 0.5)
    found["all, QJL: keys of 256 signs, values 4 bits"] = partial(
        rounded, prompt, partial(qjl, rows=256, bits=4), 4.375
    )
    for prefix in (0, 4):
        found[f"all, QFeP: {prefix} first tokens in floats, 4 bits, no other floats"] = partial(
            without_tail, prompt, prefix
        )
    for channels in (8, 16):
        found[f"read, indexer of {channels} channels"] = partial(by_indexer, channels, budget)
    found["read, centroids (Squeezed Attention)"] = partial(by_centroids, budget)
    return found


def main(
    model: Annotated[str, typer.Option(help="smollm2, a .gguf file, or a Hugging Face folder")] = "smollm2",
    tokens: Annotated[int, typer.Option(min=1024, help="of the prompt")] = 7936,
    share: Annotated[float, typer.Option(min=0.01, max=1, help="of the tokens, that stay")] = 1 / 3,
    read: Annotated[int, typer.Option(min=16, help="tokens of the pages that a query chooses")] = 1024,
    only: Annotated[list[str] | None, typer.Option(help="names of methods, with * for anything")] = None,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    json_file: JsonFile = None,
) -> None:
    """Read the prompt, evict by each score, print what that costs."""
    torch.set_num_threads(threads)
    checkpoint = fetch(model) if model == "smollm2" else Path(model)
    if checkpoint.suffix == ".gguf":
        loaded = load_gguf(checkpoint)[0]
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(checkpoint.parent), gguf_file=checkpoint.name)
    else:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(checkpoint))
    every_id = torch.tensor(tokenizer(python_documentation())["input_ids"])
    ids = every_id[: tokens + NEXT]
    began = time.perf_counter()
    prompt = Prompt(loaded, ids)
    print(f"prompt read in {time.perf_counter() - began:.0f} s", flush=True)
    reference = prompt.log_probabilities(Way())
    table, rows = Table("kept by", "bytes", "KL, mean", "KL, 99%", "perplexity"), []
    for name, make in ways(prompt, share, read).items():
        if only and not any(fnmatch.fnmatch(name, pattern) for pattern in only):
            continue
        if "kvzap" in name and prompt.probes is None:
            prompt.probes = learn_probes(loaded, every_id[len(ids) : len(ids) + 4096 + NEXT])
            prompt.take_model()
        way = make()
        found = prompt.log_probabilities(way)
        kl = (reference.exp() * (reference - found)).sum(-1)
        nats = -found[:-1].gather(-1, ids[-NEXT + 1 :, None])
        row = {"kept_by": name, "bytes": way.bytes, "kl": float(kl.mean()), "kl_99": float(kl.quantile(0.99))}
        row["perplexity"] = float(nats.mean().exp())
        rows.append(row)
        print(row, flush=True)
        table.add_row(name, *(f"{row[figure]:.4f}" for figure in ("bytes", "kl", "kl_99", "perplexity")))
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
