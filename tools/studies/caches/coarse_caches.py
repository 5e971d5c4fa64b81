"""Caches that keep all tokens with less of each: fewer bits, fewer channels, fewer directions, layers in pairs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tools.studies.caches.eviction_scores import kept_tokens
from tools.studies.caches.prompt import RECENT, SINKS, Prompt, Way
from tools.studies.caches.rounding import CHANNELS, TOKENS, Tensor, asymmetric, normal_levels, rotation


def of_classes(prompt: Prompt, saliency: Callable[[Prompt, int], Tensor], share: float) -> Way:
    """Tokens of the largest saliency are rounded to 4 bits, others to 2; rotated, in pages (MiKV, ZipCache)."""
    cache = {}
    for layer, (keys, values) in prompt.cache.items():
        is_large = kept_tokens(saliency(prompt, layer), round(prompt.length * share))[..., None]
        numbers = []
        for index, original in enumerate((keys, values)):
            coordinates = original @ rotation(original.shape[-1])
            parts = [_in_pages(coordinates, bits, (TOKENS, CHANNELS)[index]) for bits in (4, 2)]
            new_numbers: Tensor = torch.where(is_large, parts[0], parts[1]) @ rotation(original.shape[-1]).mT
            new_numbers[:, :64], new_numbers[:, -128:] = original[:, :64], original[:, -128:]
            numbers.append(new_numbers)
        cache[layer] = (numbers[0], numbers[1])
    return Way(cache=cache, bytes=(4 * share + 2 * (1 - share) + 1) / 16)


def coarse_rest(prompt: Prompt, kept_mask: dict[int, Tensor], kept_bits: int | None, rest_bits: int) -> Way:
    """Tokens that others evict are rounded to few bits; kept ones to more bits, or not at all.

    Rotated, in pages of 64 tokens. A low and a step in float16 take half a bit per number, the mask of kept tokens a
    bit per token, and numbers that are not rounded 16 bits.
    """
    cache, share = {}, torch.stack([mask.float().mean() for mask in kept_mask.values()]).mean().item()
    for layer, (keys, values) in prompt.cache.items():
        numbers = []
        for x, axis in ((keys, TOKENS), (values, CHANNELS)):
            basis = rotation(x.shape[-1])
            coordinates = x @ basis
            kept_numbers = coordinates if kept_bits is None else _in_pages(coordinates, kept_bits, axis)
            coarse = _in_pages(coordinates, rest_bits, axis, clip=0.9 if rest_bits == 2 else 1.0)
            numbers.append(torch.where(kept_mask[layer][..., None], kept_numbers, coarse) @ basis.mT)
        cache[layer] = (numbers[0], numbers[1])
    bits = (16 if kept_bits is None else kept_bits + 0.5) * share + (rest_bits + 0.5) * (1 - share)
    return Way(cache=cache, bytes=(bits + 1 / (2 * keys.shape[-1])) / 16)


def _in_pages(x: Tensor, bits: int, axis: int, clip: float = 1.0) -> Tensor:
    pages = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 64)).unflatten(1, (-1, 64))
    return asymmetric(pages, axis, bits, clip).flatten(1, 2)[:, : x.shape[1]]


def fewer_key_channels(prompt: Prompt, share: float) -> Way:
    """Channels of keys that the newest queries use least are dropped, of all but the newest tokens (ThinK)."""
    cache = {}
    for layer, (keys, values) in prompt.cache.items():
        norms = prompt.newest_queries[layer] * keys[:, :-32].norm(dim=1)
        kept_numbers = torch.zeros_like(norms).scatter_(1, norms.topk(round(share * norms.shape[1])).indices, 1.0)
        cache[layer] = (torch.cat([keys[:, :-32] * kept_numbers[:, None], keys[:, -32:]], 1), values)
    return Way(cache=cache, bytes=(share + 1) / 2)


def round_cache(
    prompt: Prompt, round_layer: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]], bits: float
) -> Way:
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
    cache = {layer: per_token(layer, *pair, bits=4, prefix=prefix) for layer, pair in prompt.cache.items()}
    return Way(cache=cache, bytes=4.5 / 16)


def _levels(x: Tensor, bits: int) -> Tensor:
    """Round each token to Lloyd's and Max's levels of a normal distribution, times the root of its mean square."""
    size, levels = x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-20), normal_levels(bits)
    rounded_levels: Tensor = levels[torch.bucketize(x / size, (levels[1:] + levels[:-1]) / 2)] * size
    return rounded_levels


def _sketch(x: Tensor, rows: int, seed: int = 0) -> Tensor:
    """Return an estimate of x from the signs of ``rows`` random products and its length: unbiased in products (QJL)."""
    matrix = torch.randn(x.shape[-1], rows, generator=torch.Generator().manual_seed(seed))
    signs = (x @ matrix).sign()
    estimate: Tensor = x.norm(dim=-1, keepdim=True) * (torch.pi / 2) ** 0.5 / rows * (signs @ matrix.mT)
    return estimate


def turboquant(layer: int, keys: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Rotated; keys by levels of one bit less and a sketch of the residual, values by levels (TurboQuant)."""
    del layer
    basis = rotation(keys.shape[-1])
    coordinates, value_coordinates = keys @ basis, values @ basis
    low = _levels(coordinates, bits - 1)
    return (low + _sketch(coordinates - low, keys.shape[-1])) @ basis.mT, _levels(value_coordinates, bits) @ basis.mT


def qjl(layer: int, keys: Tensor, values: Tensor, rows: int, bits: int) -> tuple[Tensor, Tensor]:
    """Signs of random products of keys, values per token (QJL, Zandieh et al. 2024)."""
    del layer
    return _sketch(keys, rows), asymmetric(values, CHANNELS, bits)


def smooth_attention(layer: int, keys: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Channels of keys divided by the root of their largest number, one factor for each rotary pair (QServe)."""
    del layer
    half = keys.shape[-1] // 2
    largest = keys.abs().amax(1, keepdim=True)
    pair = torch.maximum(largest[..., :half], largest[..., half:]).sqrt().clamp_min(1e-6)
    factors = torch.cat([pair, pair], -1)
    return asymmetric(keys / factors, CHANNELS, bits) * factors, asymmetric(values, CHANNELS, bits)


def per_token(layer: int, keys: Tensor, values: Tensor, bits: int, prefix: int) -> tuple[Tensor, Tensor]:
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
        widths = 0.5 * variance.clamp_min(1e-12).log2()
        widths = (widths - widths.mean(-1, keepdim=True) + bits).round().clamp(0, 8)
        coordinates = (x - mean) @ basis
        parts = [torch.zeros_like(coordinates), *(_in_pages(coordinates, width, TOKENS) for width in range(1, 9))]
        new_coordinates = torch.stack(parts).gather(0, widths.long()[None, :, None].expand(1, *coordinates.shape))[0]
        pair.append(new_coordinates @ basis.mT + mean)
    return pair[0], pair[1]


def oscar(prompt: Prompt, layer: int, keys: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Keys along eigenvectors of the queries, mixed by Hadamard and clipped, per token; values by theirs (OSCAR)."""
    query_gram = prompt.gram[layer]
    weights = torch.einsum("htc,hcd,htd->ht", keys, query_gram, keys)
    pair = []
    for x, gram in ((keys, query_gram), (values, (values * weights[..., None]).mT @ values)):
        basis = torch.linalg.eigh(gram).eigenvectors @ rotation(x.shape[-1])
        pair.append(asymmetric(x @ basis, CHANNELS, bits, clip=0.9) @ basis.mT)
    return pair[0], pair[1]


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
    result: Tensor = (rows @ basis @ basis.mT).unflatten(1, (len(x), -1)).transpose(0, 1).contiguous()
    return result


def shared_layers(prompt: Prompt, kept_share: float) -> Way:
    """Two neighbours of the deeper layers share directions, each with its lengths; others stay (MiniCache)."""
    cache = dict(prompt.cache)
    for layer in range(len(cache) // 2, len(cache) - 1, 2):
        pair = [prompt.cache[layer], prompt.cache[layer + 1]]
        new_pair: list[list[Tensor]] = [[], []]
        for index in (0, 1):
            units = [torch.nn.functional.normalize(states[index], dim=-1) for states in pair]
            angle = (units[0] * units[1]).sum(-1, keepdim=True).clamp(-1 + 1e-6, 1 - 1e-6).acos()
            middle = (units[0] + units[1]) * ((angle / 2).sin() / angle.sin())
            is_different = kept_tokens(angle[..., 0], max(SINKS + RECENT, round(kept_share * prompt.length)))[..., None]
            for position, states in enumerate(pair):
                merged_states = middle * states[index].norm(dim=-1, keepdim=True)
                new_pair[position].append(torch.where(is_different, states[index], merged_states))
        cache[layer], cache[layer + 1] = (new_pair[0][0], new_pair[0][1]), (new_pair[1][0], new_pair[1][1])
    return Way(cache=cache, bytes=0.75 + kept_share / 4)
