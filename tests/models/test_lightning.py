"""Lightning attention of MiniMax: one recurrence in place of blocks and of steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from graphopt.models import lightning
from graphopt.models.recurrent_calls import Calls
from tests.families import HIDDEN, randomize
from tests.recurrences import run_by_reference

# Relative to the largest output: blocks of transformers sum in float32 in another order.
TOLERANCE = 1e-5


@pytest.mark.parametrize("tokens", [1, 20])
def test_outputs_are_those_of_blocks(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_by_reference(monkeypatch)
    config = transformers.MiniMaxConfig(
        hidden_size=HIDDEN, num_attention_heads=4, head_dim=16, num_hidden_layers=2, block_size=8
    )
    layer = MiniMaxLightningAttention(config, 0)
    torch.manual_seed(0)
    randomize(layer)
    x, states = torch.randn(2, tokens, HIDDEN), {}
    cache = SimpleNamespace(
        get_recurrent_state=states.get, update_recurrent_state=lambda state, layer: states.update({layer: state})
    )
    forward = lightning.with_cached_state(Calls(), MiniMaxLightningAttention.forward)
    with torch.no_grad():
        expected, expected_state = layer(x, None, None)
        output, _ = forward(layer, x, past_key_values=cache)
    assert names == ["LinearRecurrence"]
    assert (output - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert (states[0] - expected_state).abs().max() <= TOLERANCE * expected_state.abs().max()
