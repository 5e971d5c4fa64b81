"""Replacements of evicted tokens: features of all of them together (NTK-Attention), or a few fused tokens (LoCoCo).

The papers train their parts by gradient descent; here they are fitted in closed form, or by steps of a convex problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tools.studies.caches.eviction_scores import kept_tokens, mean_received
from tools.studies.caches.prompt import RECENT, SINKS, Prompt, Way
from tools.studies.caches.rounding import Tensor

PAGE = 16
WINDOW = 5
"""Tokens that a convolution sees."""
_MOST_GAIN = 100.0
"""Largest factor that the number of tokens of a feature is multiplied by."""


def with_page_means(prompt: Prompt, score: Callable[[Prompt, int], Tensor], count: int, *, is_fitted: bool) -> Way:
    """Every 16 evicted tokens become one: the exponential of queries times their mean key (NTK-Attention).

    Attention to kept tokens has sums exp(q k) v and exp(q k); evicted ones add phi(q) Z and phi(q) z (Liang et al.
    2024), here with phi(q) = exp(q m) of the means m, z = 16, and Z the sum of their values: exact where the keys are
    equal. ``is_fitted``: z and Z minimize the relative error of the prompt's last queries, with z >= 0. A mean, a sum
    and a number take the bytes of a token.

    Args:
        prompt: the prompt.
        score: by which tokens are kept.
        count: of kept tokens, plus pages of evicted ones.
        is_fitted: see above.
    """
    pages = -(-(prompt.length - count) // (PAGE - 1))  # E evicted tokens are E / 16 pages of count
    kept_masks = {layer: kept_tokens(score(prompt, layer), count - pages) for layer in prompt.cache}
    summaries: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for layer, (keys, values) in prompt.cache.items():
        means, sums, numbers = [], [], []
        for head, is_kept in enumerate(kept_masks[layer]):
            parts = [numbers_of[head][~is_kept].split(PAGE) for numbers_of in (keys, values)]
            means.append(torch.stack([part.mean(0) for part in parts[0]]))
            sums.append(torch.stack([part.mean(0) for part in parts[1]]))
            numbers.append(torch.tensor([float(len(part)) for part in parts[0]]))
        fit = (torch.stack(means), torch.stack(sums), torch.stack(numbers))
        summaries[layer] = _fit(prompt, layer, kept_masks[layer], *fit) if is_fitted else fit

    def read_summaries(layer: int, queries: Tensor) -> tuple[Tensor, Tensor]:
        means, values, numbers = summaries[layer]
        return queries @ means[:, None].mT + numbers[:, None, None].clamp_min(1e-20).log(), values

    return Way(kept_masks, read_extra=read_summaries, bytes=count / prompt.length)


def _fit(
    prompt: Prompt, layer: int, kept_mask: Tensor, means: Tensor, values: Tensor, numbers: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return means, and the values and numbers that best give the prompt's last queries their attention."""
    keys, all_values = (tensor.double() for tensor in prompt.cache[layer])
    means, values, numbers = means.double(), values.double(), numbers.double()
    queries = prompt.last_queries[layer].double()  # [Hk, n, D], scaled
    features = queries @ means.mT
    scores = (queries @ keys.mT).masked_fill(kept_mask[:, None], -torch.inf)
    top = torch.maximum(features.amax(-1, keepdim=True), scores.amax(-1, keepdim=True))
    phi, weights = (features - top).exp(), (scores - top).exp()
    total = weights.sum(-1, keepdim=True).clamp_min(1e-30)
    phi, goal = phi / total, (weights / total) @ all_values  # the goal of phi z is 1 then
    z, gram = numbers.clone(), phi.mT @ phi
    ridge = 1e-2 * gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    for _ in range(100):  # multiplicative steps (Lee and Seung 2000) go down and stay above 0
        z = z * (phi.sum(1) + ridge * numbers) / ((gram @ z[..., None])[..., 0] + ridge * z).clamp_min(1e-200)
        z = torch.minimum(z, _MOST_GAIN * numbers)
    shares = torch.softmax(features + z[:, None].clamp_min(1e-20).log(), -1)
    gram = shares.mT @ shares
    gram = gram + 1e-2 * torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).expand_as(z))
    # Cholesky: LU of a batch of 171 rows and more failed in PyTorch with MKL on an EPYC
    values = values + torch.cholesky_solve(shares.mT @ (goal - shares @ values), torch.linalg.cholesky(gram))
    return means.float(), values.float(), z.float()


def with_random_features(prompt: Prompt, count: int, features: int, seed: int = 0) -> Way:
    """Evicted tokens are summed by positive random features (Performer's), as NTK-Attention sums them.

    phi(x) = exp(w x - |x|^2 / 2) / sqrt(features), for random w, orthogonal in sets; unbiased for exp(q k). A feature
    has a sum of values and a number, so two take the bytes of a token; the newest tokens are kept.
    """
    size = next(iter(prompt.cache.values()))[0].shape[-1]
    generator = torch.Generator().manual_seed(seed)
    blocks = [torch.randn(size, size, generator=generator) for _ in range(-(-features // size))]
    lengths = torch.randn(len(blocks) * size, size, generator=generator).norm(dim=-1, keepdim=True)
    w = (torch.cat([torch.linalg.qr(block).Q for block in blocks]) * lengths)[:features]
    newest = torch.arange(prompt.length, dtype=torch.float32)
    balance = size**0.25  # queries come divided by its square
    kept_masks = {
        layer: kept_tokens(newest.expand(len(keys), -1), count - features // 2)
        for layer, (keys, _) in prompt.cache.items()
    }
    summaries = {}
    for layer, (keys, values) in prompt.cache.items():
        # the mean of keys is subtracted: it multiplies all sums of a query by the same factor
        middle = keys.mean(1, keepdim=True)
        short_keys = (keys - middle) / balance
        logs = short_keys @ w.mT - short_keys.square().sum(-1, keepdim=True) / 2
        weights = torch.softmax(logs.masked_fill(kept_masks[layer][..., None], -torch.inf), 1)
        totals = logs.masked_fill(kept_masks[layer][..., None], -torch.inf).logsumexp(1)
        summaries[layer] = (middle, totals, weights.mT @ values)

    def read_summaries(layer: int, queries: Tensor) -> tuple[Tensor, Tensor]:
        middle, totals, values = summaries[layer]
        long_queries = queries * balance
        logs = long_queries @ w.mT - long_queries.square().sum(-1, keepdim=True) / 2 - math.log(features)
        return logs + totals[:, None, None] + queries @ middle[:, None].mT, values

    return Way(kept_masks, read_extra=read_summaries, bytes=count / prompt.length)


def learn_convolutions(model: Any, ids: Tensor) -> dict[int, Tensor]:
    """Return, by layer, filters [Hk, WINDOW 2 D + 1] that predict a token's log attention from keys and values near it.

    Fitted in closed form on another text, as the probes of KVzap are.
    """
    text, filters = Prompt(model, ids), {}
    for layer in text.cache:
        inputs = _windows(text, layer)[:, SINKS:-RECENT].double()
        goal = mean_received(text, layer)[:, SINKS:-RECENT].clamp_min(1e-9).log().double()[..., None]
        gram = inputs.mT @ inputs
        ridge = 1e-3 * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(gram.shape[-1]).double()
        filters[layer] = torch.cholesky_solve(inputs.mT @ goal, torch.linalg.cholesky(gram + ridge))[..., 0].float()
    return filters


def _windows(prompt: Prompt, layer: int) -> Tensor:
    """Return keys before the rotary embedding and values of a token and its neighbours, and 1, [Hk, tokens, n]."""
    keys, values = prompt.cache[layer]
    features = torch.cat([prompt.rotate(keys, torch.arange(keys.shape[1]), -1), values], -1)
    half = WINDOW // 2
    rows = torch.nn.functional.pad(features, (0, 0, half, half))
    windows = torch.cat([rows[:, shift : shift + features.shape[1]] for shift in range(WINDOW)], -1)
    return torch.nn.functional.pad(windows, (0, 1), value=1.0)


def fuse_neighbours(prompt: Prompt, count: int, *, is_counted: bool) -> Way:
    """Neighbouring tokens between the first and the newest are fused into as many as there is room for (LoCoCo).

    A convolution over keys and values gives each token a weight, by which the keys, before the rotary embedding, and
    values of neighbours are averaged (Cai et al. 2024). There the convolution is trained with the loss of the model;
    here it is fitted to the attention that tokens received. ``is_counted``: a fused token counts as many times.
    """
    first, end, slots = SINKS, prompt.length - RECENT, count - SINKS - RECENT
    slot = (torch.arange(end - first) * slots) // (end - first)
    positions = torch.arange(prompt.length).float()
    sizes = torch.bincount(slot, minlength=slots).float()
    kept_masks, fused_tokens = {}, {}
    for layer, (keys, values) in prompt.cache.items():
        scores = (_windows(prompt, layer) @ prompt.filters[layer][..., None])[:, first:end, 0]
        weights = (scores - scores.amax(1, keepdim=True)).exp().clamp_min(1e-20)
        total = torch.zeros(len(keys), slots).index_add(1, slot, weights)
        weights = weights / total[:, slot]
        plain = prompt.rotate(keys, torch.arange(prompt.length), -1)
        parts = [
            torch.zeros(len(keys), slots, keys.shape[-1]).index_add(1, slot, weights[..., None] * numbers[:, first:end])
            for numbers in (plain, values)
        ]
        middles = torch.zeros(slots).index_add(0, slot, positions[first:end]) / sizes
        fused_tokens[layer] = (prompt.rotate(parts[0], middles.round(), 1), parts[1])
        kept_masks[layer] = torch.zeros(len(keys), prompt.length, dtype=torch.bool)
        kept_masks[layer][:, :first] = kept_masks[layer][:, end:] = True

    def read_fused(layer: int, queries: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = fused_tokens[layer]
        return queries @ keys[:, None].mT + (sizes.log() if is_counted else 0), values

    return Way(kept_masks, read_extra=read_fused, bytes=count / prompt.length)
