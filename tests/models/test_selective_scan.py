"""The selective scan of Zamba: one recurrence in place of one for each of its heads."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.zamba.modeling_zamba import ZambaMambaMixer

from graphopt.models.recurrence import recurrences_as_nodes
from tests.families import HIDDEN, randomize
from tests.recurrences import run_by_reference

# Relative to the largest output: products and steps of transformers sum in float32 in another order.
TOLERANCE = 1e-5


def test_groups_of_channels_share_a_recurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.ZambaConfig(
        hidden_size=HIDDEN, n_mamba_heads=4, mamba_d_state=8, mamba_dt_rank=6, num_hidden_layers=2,
        layers_block_type=["linear_attention", "hybrid"], num_attention_heads=4,
    )  # fmt: skip
    layer = ZambaMambaMixer(config, 0)
    torch.manual_seed(0)
    randomize(layer)
    pieces = torch.randn(2, 9, HIDDEN), torch.randn(2, 1, HIDDEN)
    cache, cache_of_nodes = (transformers.DynamicCache(config=config) for _ in range(2))
    names = run_by_reference(monkeypatch)
    with torch.no_grad():
        expected = [layer(x, cache) for x in pieces]
        with recurrences_as_nodes():
            outputs = [layer(x, cache_of_nodes) for x in pieces]
    assert names == ["CausalConv", "LinearRecurrence"] * 2
    for output, reference in zip(outputs, expected, strict=True):
        assert (output - reference).abs().max() <= TOLERANCE * reference.abs().max()
    state, reference = (part.layers[0].recurrent_states[0].reshape(2, -1, 8) for part in (cache_of_nodes, cache))
    assert (state - reference).abs().max() <= TOLERANCE * reference.abs().max()
