"""The first GPT: keys and values are cached, where transformers reads the whole text again."""

from __future__ import annotations

import torch
import transformers

from graphopt.models.recurrence import recurrences_as_nodes
from tests.families import HIDDEN, POSITIONS, VOCABULARY, randomize

# Relative to the largest logit: sums of float32 in another order.
TOLERANCE = 1e-5
TOKENS, PADDING = 20, 3


def test_logits_are_those_of_transformers() -> None:
    config = transformers.OpenAIGPTConfig(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=POSITIONS
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize(model)
    ids = torch.randint(0, VOCABULARY, (2, TOKENS))
    padded_ids = torch.cat((ids[:, :PADDING], ids), dim=1)
    mask = (torch.arange(TOKENS + PADDING) >= PADDING).long().expand(2, -1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(ids).logits
        with recurrences_as_nodes():
            first = model(ids[:, :-1])
            last = model(ids[:, -1:], past_key_values=first.past_key_values)
            cache, pieces = None, []
            for begin, end in ((0, 12), (12, 22), (22, 23)):
                output = model(
                    padded_ids[:, begin:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, begin:end],
                    past_key_values=cache,
                )
                cache = output.past_key_values
                pieces.append(output.logits)
    largest = expected.abs().max()
    assert (torch.cat((first.logits, last.logits), dim=1) - expected).abs().max() <= TOLERANCE * largest
    assert (torch.cat(pieces, dim=1)[:, PADDING:] - expected).abs().max() <= TOLERANCE * largest
