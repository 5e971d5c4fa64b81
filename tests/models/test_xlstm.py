"""xLSTM: one recurrence in place of chunks and of steps, whose states are not divided by the largest gate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.initialization import no_init_weights

from graphopt.errors import InputError
from graphopt.models.recurrence import recurrences_as_nodes
from tests.families import VOCABULARY, randomize
from tests.recurrences import run_by_reference

# Relative to the largest logit. Gates this large take digits: chunks and steps of transformers in float32 lie 3e-5 to
# 5e-5 from its steps in float64; without the 1e-6 in the denominator the latter move by 2e-7.
TOLERANCE = 1e-4
TOKENS, PADDING = 37, 3


def make_model(cap: float, mode: str) -> Any:
    """Return a model of two layers whose gates are at times as far from zero as their cap."""
    config = transformers.xLSTMConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, num_heads=4, chunk_size=16, gate_soft_cap=cap,
        weight_mode=mode,
    )  # fmt: skip
    torch.manual_seed(0)
    with no_init_weights():  # that of fused weights adds biases of two sizes
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize(model)
    for name, parameter in model.named_parameters():
        if name.endswith(("igate_preact.weight", "fgate_preact.weight")):
            parameter.data.mul_(cap)
    return model


@pytest.mark.parametrize(("cap", "mode"), [(2.0, "single"), (15.0, "fused")])
def test_logits_are_those_of_transformers(cap: float, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make_model(cap, mode), torch.randint(0, VOCABULARY, (2, TOKENS))
    names = run_by_reference(monkeypatch)
    mask = (torch.arange(TOKENS + PADDING) >= PADDING).long().expand(2, -1)
    with torch.no_grad():
        expected = model(ids).logits
        with recurrences_as_nodes():
            first = model(torch.cat((ids[:, :PADDING], ids[:, :30]), dim=1), attention_mask=mask[:, : 30 + PADDING])
            last = model(ids[:, 30:], attention_mask=mask, past_key_values=first.past_key_values)
    assert names == ["LinearRecurrence"] * 4
    logits = torch.cat((first.logits[:, PADDING:], last.logits), dim=1)
    assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_gates_that_float32_does_not_hold_are_refused() -> None:
    with recurrences_as_nodes(), pytest.raises(InputError, match=r"exp\(100\), which float32 does not hold"):
        make_model(100.0, "single")(torch.zeros((1, 2), dtype=torch.int64))
