"""Retrieval from a whole cache: each query reads the pages, clusters or tokens of the best scores."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tools.studies.caches.eviction_scores import mean_received
from tools.studies.caches.prompt import RECENT, SINKS, Prompt, Way
from tools.studies.caches.rounding import Tensor

PAGE = 16


def by_indexer(channels: int, budget: int) -> Way:
    """Tokens of the best scores by few channels of queries and keys.

    The channels are fitted in closed form to the queries and keys of the prompt: the best approximation of all scores
    of that rank.
    """

    def choose(prompt: Prompt, layer: int, queries: Tensor) -> Tensor:
        keys = prompt.cache[layer][0]
        values, vectors = torch.linalg.eigh(keys.mT @ keys)
        root = vectors * values.clamp_min(1e-6).sqrt()[:, None] @ vectors.mT
        inverse = vectors * values.clamp_min(1e-6).rsqrt()[:, None] @ vectors.mT
        best = torch.linalg.eigh(root @ prompt.gram[layer] @ root).eigenvectors[..., -channels:]
        short_queries, short_keys = queries @ (root @ best)[:, None], keys @ (inverse @ best)
        scores = (short_queries @ short_keys[:, None].mT).softmax(-1).mean(1, keepdim=True)
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(budget, -1).indices, True)
        mask[..., :SINKS] = mask[..., -RECENT:] = True
        return mask

    return Way(choose=choose)


def choose_pages(score: Callable[[Prompt, int, Tensor], Tensor], budget: int) -> Way:
    """Each query reads the pages of the best scores, besides the first and the newest tokens."""

    def choose(prompt: Prompt, layer: int, queries: Tensor) -> Tensor:
        scores = score(prompt, layer, queries)  # [Hk, group, n, pages]
        scores = scores.softmax(-1).mean(1, keepdim=True)  # of all query heads, as KVAttention has it
        best = scores.topk(budget // PAGE, dim=-1).indices
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True).repeat_interleave(PAGE, -1)
        mask[..., :SINKS] = mask[..., -RECENT:] = True
        return mask

    return Way(choose=choose)


def _pages(x: Tensor) -> Tensor:
    pages: Tensor = x.unflatten(1, (-1, PAGE))
    return pages


def by_mean(prompt: Prompt, layer: int, queries: Tensor) -> Tensor:
    """The mean of a page's keys (TriForce)."""
    scores: Tensor = queries @ _pages(prompt.cache[layer][0]).mean(2)[:, None].mT
    return scores


def by_bounds(prompt: Prompt, layer: int, queries: Tensor) -> Tensor:
    """The largest score of any key between the least and largest numbers of a page (Quest)."""
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
        mask = torch.stack(masks)[:, None]
        mask[..., :SINKS] = mask[..., -RECENT:] = True
        return mask

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
