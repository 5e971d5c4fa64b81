"""Scores of tokens for eviction, and the tokens that heads keep by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tools.studies.caches.prompt import RECENT, SINKS, Prompt, Way
from tools.studies.caches.rounding import Tensor


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


def snapkv_late(prompt: Prompt, layer: int) -> Tensor:
    """The same, of the last 512 queries, times the lengths of values (as VATP, Guo et al. 2024)."""
    attention = torch.nn.functional.max_pool1d(prompt.late[layer][None], 7, 1, 3)[0]
    scores: Tensor = attention * prompt.cache[layer][1].norm(dim=-1)
    return scores


def sum_received(prompt: Prompt, layer: int) -> Tensor:
    """Attention of all queries, here of every 8th, added up (H2O, Zhang et al. 2023)."""
    return prompt.attention_sums[layer]


def mean_received(prompt: Prompt, layer: int) -> Tensor:
    """The same, per query that could have seen the token."""
    return prompt.attention_sums[layer] / (prompt.length - torch.arange(prompt.length)).clamp(min=64)


def expected_attention(prompt: Prompt, layer: int) -> Tensor:
    """E[exp(q k)] |v| for normal queries at the next 512 positions (Devoto et al. 2025), the mean over the heads."""
    keys, values = prompt.cache[layer]
    mean, covariance = prompt.queries[layer]
    size, group = keys.shape[-1], len(mean) // len(keys)
    positions = torch.arange(prompt.length, prompt.length + 512)
    unit = torch.eye(size).expand(512, -1, -1).transpose(0, 1)  # [D, 512, D]
    turn = prompt.rotate(unit, positions, 1).mean(1)  # of rows, averaged
    mean, covariance = mean @ turn, turn.mT @ covariance @ turn
    head_scores = []
    for head, k in enumerate(keys):
        rows = slice(head * group, (head + 1) * group)
        linear = k @ mean[rows].mT / size**0.5
        square = torch.einsum("tc,hcd,td->th", k, covariance[rows], k) / (2 * size)
        head_scores.append(torch.softmax(linear + square, 0).mean(-1))
    scores: Tensor = torch.stack(head_scores) * values.norm(dim=-1)
    return scores


def next_queries(prompt: Prompt, layer: int) -> Tensor:
    """Attention of the next tokens' queries, which are not known in practice: a bound, no method."""
    return prompt.future[layer]


def probe(prompt: Prompt, layer: int) -> Tensor:
    """A linear score of hidden states, learned on another text (KVzap, Jegou et al. 2026)."""
    if prompt.probes is None:
        raise AssertionError("probes are learned first")
    weights = prompt.probes[layer]
    hidden = torch.nn.functional.pad(prompt.hidden[layer], (0, 1), value=1.0)
    return (hidden @ weights).mT


def learn_probes(model: Any, ids: Tensor) -> dict[int, Tensor]:
    """Return, by layer, weights [size + 1, Hk] that predict log(attention of later queries) from a hidden state."""
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
    "snapkv of 512 queries, by values": snapkv_late,
    "accumulated attention": sum_received,
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


def kept_of_all(scores: dict[int, Tensor], count: int) -> dict[int, Tensor]:
    """Return which tokens heads keep where those of all layers share ``count`` for each on average."""
    layers = list(scores)
    masks = kept_tokens(torch.cat([scores[layer] for layer in layers]), count, is_shared=True)
    heads = [len(scores[layer]) for layer in layers]
    return dict(zip(layers, masks.split(heads), strict=True))


def merge_tokens(prompt: Prompt, count: int) -> Way:
    """Evicted tokens are averaged into the kept one of the nearest key, above a cosine of 0.6 (EMS)."""
    kept_masks, cache = {}, {}
    for layer, (keys, values) in prompt.cache.items():
        scores = snapkv(prompt, layer) * mean_received(prompt, layer)  # of the newest queries, and of all
        kept_masks[layer] = kept_tokens(scores, count)
        new_keys, new_values = keys.clone(), values.clone()
        for head, is_kept in enumerate(kept_masks[layer]):
            kept_positions = is_kept.nonzero()[SINKS:, 0]  # the first stay as they are
            unit = torch.nn.functional.normalize(keys[head], dim=-1)
            likeness, nearest = (unit[~is_kept] @ unit[kept_positions].mT).max(1)
            is_near = likeness > 0.6
            weight, kept_weights = scores[head][~is_kept][is_near, None], scores[head][kept_positions, None]
            total = kept_weights.index_add(0, nearest[is_near], weight).clamp_min(1e-20)
            for numbers, new in ((keys[head], new_keys[head]), (values[head], new_values[head])):
                sums = (kept_weights * numbers[kept_positions]).index_add(
                    0, nearest[is_near], weight * numbers[~is_kept][is_near]
                )
                new[kept_positions] = sums / total
        cache[layer] = (new_keys, new_values)
    return Way(kept_masks, cache, bytes=count / prompt.length)
