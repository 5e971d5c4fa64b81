"""What the studies of caches share: which tokens heads keep, and coordinates in which numbers are rounded."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tools.studies.caches.compensation import fuse_neighbours, with_page_means, with_random_features
from tools.studies.caches.eviction_scores import kept_of_all, kept_tokens, streaming
from tools.studies.caches.prompt import NEXT, RECENT, SINKS, Prompt, Way
from tools.studies.caches.spectral import Statistics, allot, by_bits, karhunen_loeve, orthogonal

TOKENS, HEADS, SIZE = 512, 2, 16


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(HEADS, TOKENS, SIZE, generator=torch.Generator().manual_seed(seed)) * torch.arange(1.0, SIZE + 1)


def test_heads_of_all_layers_share_what_is_kept() -> None:
    scores = {layer: torch.rand(HEADS, TOKENS) * (layer + 1) for layer in (0, 1, 2)}
    masks = kept_of_all(scores, 400)
    assert sum(int(mask.sum()) for mask in masks.values()) == 400 * HEADS * 3
    assert all(bool(mask[:, :SINKS].all() and mask[:, -RECENT:].all()) for mask in masks.values())
    assert int(masks[2].sum()) > int(masks[0].sum())  # its scores are larger
    assert (kept_tokens(scores[0], 400).sum(-1) == 400).all()


@pytest.mark.parametrize("coordinates", [orthogonal, karhunen_loeve])
def test_coordinates_give_back_what_goes_in_and_err_by_their_bits(coordinates: object) -> None:
    keys, queries = numbers(0), numbers(1)
    statistics = Statistics.from_text(queries, keys, keys, torch.eye(HEADS * SIZE))
    assert callable(coordinates)
    errors = []
    for bits in (2.0, 4.0, 8.0):
        (allotment,) = allot([coordinates(statistics.keys, statistics.queries)], bits)
        assert allotment.bits.double().mean() == bits
        result = allotment.round_pages(keys, lambda x, _: x, 64)
        torch.testing.assert_close(result, keys, rtol=1e-4, atol=1e-3)  # two products in float32
        coarse_keys = allotment.round_pages(keys, lambda x, widths: by_bits(x, widths, clips={}), 64)
        errors.append(float((coarse_keys - keys).square().mean()))
    # 2 bits more divide a normal number's squared error by 10 to 14
    assert errors[0] > 6 * errors[1] > 36 * errors[2]


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    """A small random model that has read 512 random tokens."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, head_dim=16, **sizes))
    text_prompt = Prompt(model, torch.randint(64, (TOKENS + NEXT,)))
    text_prompt.filters = {0: torch.zeros(2, 5 * 32 + 1)}
    return text_prompt


@pytest.mark.parametrize("is_fitted", [False, True])
def test_page_means_stand_for_keys_that_are_alike(prompt: Prompt, is_fitted: bool) -> None:
    keys, values = (numbers.clone() for numbers in prompt.cache[0])
    keys[:, SINKS:-RECENT] = keys[:, SINKS : SINKS + 1]  # whichever pages they come to lie in
    cache, before = {0: (keys, values)}, prompt.cache
    prompt.cache = cache
    try:
        exact = prompt.log_probabilities(Way())
        way = with_page_means(prompt, streaming, 400, is_fitted=is_fitted)
        assert way.kept_masks is not None
        assert int(way.kept_masks[0][0].sum()) < 400
        # numbers of a fit go down to their least by steps
        torch.testing.assert_close(prompt.log_probabilities(way), exact, rtol=0, atol=0.02 if is_fitted else 1e-4)
    finally:
        prompt.cache = before


def test_random_features_come_near_short_keys(prompt: Prompt) -> None:
    short, before = {0: (prompt.cache[0][0] * 0.1, prompt.cache[0][1])}, prompt.cache
    prompt.cache = short
    try:
        exact, recent_only = (
            prompt.log_probabilities(Way()),
            prompt.log_probabilities(Way(kept_masks={0: _newest(prompt)})),
        )
        with_features = prompt.log_probabilities(with_random_features(prompt, 384, 64))
        assert (with_features - exact).abs().mean() < (recent_only - exact).abs().mean()
    finally:
        prompt.cache = before


def _newest(prompt: Prompt) -> torch.Tensor:
    return kept_tokens(streaming(prompt, 0), 384)


@pytest.mark.parametrize("is_counted", [False, True])
def test_tokens_that_have_room_are_not_fused(prompt: Prompt, is_counted: bool) -> None:
    exact = prompt.log_probabilities(Way())
    # keys are turned back and forth in float32
    whole = prompt.log_probabilities(fuse_neighbours(prompt, TOKENS, is_counted=is_counted))
    torch.testing.assert_close(whole, exact, rtol=0, atol=1e-4)
    part = prompt.log_probabilities(fuse_neighbours(prompt, 400, is_counted=is_counted))
    assert 0 < (part - exact).abs().max() < 5
