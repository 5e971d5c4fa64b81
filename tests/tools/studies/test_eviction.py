"""What the studies of caches share: which tokens heads keep, and coordinates in which numbers are rounded."""

from __future__ import annotations

import pytest
import torch

from tools.studies.caches.eviction_scores import kept_of_all, kept_tokens
from tools.studies.caches.prompt import RECENT, SINKS
from tools.studies.caches.spectral import Statistics, allot, balanced, by_bits, orthogonal

TOKENS, HEADS, SIZE = 512, 2, 16


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(HEADS, TOKENS, SIZE, generator=torch.Generator().manual_seed(seed)) * torch.arange(1.0, SIZE + 1)


def test_heads_of_all_layers_share_what_is_kept() -> None:
    scores = {layer: torch.rand(HEADS, TOKENS) * (layer + 1) for layer in (0, 1, 2)}
    kept = kept_of_all(scores, 400)
    assert sum(int(each.sum()) for each in kept.values()) == 400 * HEADS * 3
    assert all(bool(each[:, :SINKS].all() and each[:, -RECENT:].all()) for each in kept.values())
    assert int(kept[2].sum()) > int(kept[0].sum())  # its scores are larger
    assert (kept_tokens(scores[0], 400).sum(-1) == 400).all()


@pytest.mark.parametrize("coordinates", [orthogonal, balanced])
def test_coordinates_give_back_what_goes_in_and_err_by_their_bits(coordinates: object) -> None:
    keys, queries = numbers(0), numbers(1)
    statistics = Statistics.of(queries, keys, keys, torch.eye(HEADS * SIZE))
    assert callable(coordinates)
    errors = []
    for bits in (2.0, 4.0, 8.0):
        (made,) = allot([coordinates(statistics.keys, statistics.queries)], bits)
        assert made.bits.double().mean() == bits
        same = made.rounded(keys, lambda x, _: x, 64)
        torch.testing.assert_close(same, keys, rtol=1e-4, atol=1e-3)  # two products in float32
        rounded = made.rounded(keys, lambda x, widths: by_bits(x, widths, clips={}), 64)
        errors.append(float((rounded - keys).square().mean()))
    # 2 bits more divide a normal number's squared error by 10 to 14
    assert errors[0] > 6 * errors[1] > 36 * errors[2]
