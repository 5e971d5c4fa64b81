"""Lightning attention of MiniMax: one recurrence in place of blocks and of steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from graphopt.models import lightning
from graphopt.models.recurrent_calls import Calls
from graphopt.runtime_ops import OPERATORS
from tests.families import HIDDEN, randomize

# Relative to the largest output: blocks of transformers sum in float32 in another order.
TOLERANCE = 1e-5


@pytest.mark.parametrize("tokens", [1, 20])
def test_outputs_are_those_of_blocks(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def recur(_: Calls, inputs: list[Any], state: Any, **attributes: Any) -> tuple[Any, Any]:
        arrays = [tensor.detach().numpy() for tensor in inputs]
        shape = (arrays[2].shape[0], arrays[2].shape[2], arrays[1].shape[3], arrays[2].shape[3])
        assert state is None
        no_mask, zeros = np.zeros((shape[0], 0), np.int64), np.zeros(shape, np.float32)
        output, new_state = OPERATORS["LinearRecurrence"].reference(*arrays, no_mask, zeros, **attributes)
        return torch.from_numpy(output), torch.from_numpy(new_state)

    monkeypatch.setattr(lightning, "recur", recur)
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
    assert (output - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert (states[0] - expected_state).abs().max() <= TOLERANCE * expected_state.abs().max()
