"""Graphs of torch's older exporter, which optimum uses: attention spelled out, shapes computed at run time."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import graphopt
from graphopt.models.export import export
from tests.checkpoints import save_tokenizer

TOKENS = 12
PROMPTS = ["def f(", "class Stack: def pop(self)"]


def script(source: Path, folder: Path, attention: str, opset: int) -> Path:
    """Export a Hugging Face folder with ``torch.onnx.export(dynamo=False)`` under the names of an artifact."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    model.set_attn_implementation(attention)
    config = model.config
    layers, size = config.num_hidden_layers, getattr(config, "head_dim", None) or config.hidden_size // 4

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *past: Any) -> tuple[Any, ...]:
            cache = DynamicCache()
            for layer in range(layers):
                cache.update(past[2 * layer], past[2 * layer + 1], layer)
            inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
            logits = self.model(**inputs, past_key_values=cache, use_cache=True).logits
            return (logits, *(each for layer in cache.layers for each in (layer.keys, layer.values)))

    pasts = [f"past_key_values.{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
    presents = [name.replace("past_key_values", "present") for name in pasts]
    tokens = torch.ones(2, 3, dtype=torch.long)
    positions = torch.arange(5, 8).expand(2, 3).contiguous()
    caches = [torch.zeros(2, config.num_key_value_heads, 5, size) for _ in pasts]
    names = {name: {0: "batch", 1: "length"} for name in ("input_ids", "position_ids", "logits")}
    names |= {"attention_mask": {0: "batch", 1: "total"}}
    names |= {name: {0: "batch", 2: "past"} for name in pasts} | {name: {0: "batch", 2: "total"} for name in presents}
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Step(),
            (tokens, torch.ones(2, 8, dtype=torch.long), positions, *caches),
            str(folder / "model.onnx"),
            input_names=["input_ids", "attention_mask", "position_ids", *pasts],
            output_names=["logits", *presents],
            dynamic_axes=names,
            opset_version=opset,
            dynamo=False,
        )
    for file in ("config.json", "generation_config.json"):
        (folder / file).write_bytes((source / file).read_bytes())
    save_tokenizer(folder)
    return folder


def generate(folder: Path) -> list[list[int]]:
    return [each.tokens for each in graphopt.generate(graphopt.load(folder), PROMPTS, max_new_tokens=TOKENS)]


@pytest.mark.parametrize(("family", "attention", "opset"), [("llama", "sdpa", 17), ("gemma2", "eager", 18)])
def test_every_preset_of_caches_and_rotations_takes_it(
    family: str,
    attention: str,
    opset: int,
    make_folder: Callable[[str], Path],
    make_artifact: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    export(script(make_folder(family), tmp_path / "script", attention, opset), tmp_path / "exported")
    expected = generate(tmp_path / "exported")
    if family == "llama":
        assert expected == generate(make_artifact(family))
    made = graphopt.optimize(tmp_path / "exported", "kv4", tmp_path / "kv4")
    kinds = Counter(node.op_type for node in made.model.graph)
    assert (kinds["KVAttention"], kinds["Softmax"], kinds["RotaryEmbedding"], kinds["Shape"]) == (2, 0, 4, 0)
    # Shorter than a page: nothing has been rounded yet.
    assert generate(tmp_path / "kv4") == expected
    rotated = graphopt.optimize(tmp_path / "exported", "rotate-kv4-rtn", tmp_path / "rotated")
    certificates = [check.status for check in rotated.manifest.checks if check.name == "certificate"]
    assert certificates == ["proved"]
    assert generate(tmp_path / "rotated") == expected
