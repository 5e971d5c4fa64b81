"""What the decoder of a vision-language model reads behind embeddings, against transformers' own inputs."""

from __future__ import annotations

import numpy as np
import pytest

from graphopt.models.vision_part import read_marks
from tests.vision_language import VOCABULARY, make_vision_language_model

# Two layers in float32, in the same order of sums.
FLOAT32 = 1e-6


@pytest.mark.parametrize("family", ["gemma3", "paligemma"])
def test_marked_tokens_see_those_behind_them(family: str) -> None:
    import torch

    model = make_vision_language_model(family)
    ids = torch.from_numpy(np.random.default_rng(0).integers(1, VOCABULARY, (2, 12)))
    # Of Gemma's images, or of a prompt; the first row begins with padding.
    marks = torch.zeros(2, 12)
    marks[:, 2:6] = 1
    marks[1, 7:11] = 1
    if family == "paligemma":
        marks = (torch.arange(12) < torch.tensor([[9], [12]])).float()
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :2] = 0
    types = marks if family == "gemma3" else 1 - marks
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, token_type_ids=types.long(), use_cache=False).logits
        causal = model(ids, attention_mask=mask, use_cache=False).logits
        read_marks(model)
        embeddings = torch.cat([model.get_input_embeddings()(ids), marks[..., None]], dim=-1)
        result = model(inputs_embeds=embeddings, attention_mask=mask, use_cache=False).logits
    real = mask.bool()
    scale = float(expected[real].abs().max())
    np.testing.assert_allclose(result[real] / scale, expected[real] / scale, rtol=0, atol=FLOAT32)
    assert float((expected - causal)[real].abs().max()) > 0.01 * scale
