"""The model that ships with the package: small in git, trained, and exported as transformers computes it."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from graphopt.artifact.artifact import DATA, MODEL
from graphopt.compile.pipeline import optimize
from graphopt.inference.generation import generate
from graphopt.inference.session import load
from graphopt.models.export import shipped_models
from graphopt.ort.session import open_session
from graphopt.passes.recipe import Recipe
from graphopt.quality.evaluation import evaluate
from graphopt.tasks.causal_lm.interface import Interface
from graphopt.util.stdlib_text import held_out_text
from graphopt.util.targets import Device

FOLDER = shipped_models()["stdlib_lm"]


def test_the_folder_is_a_hugging_face_folder_of_at_most_12_megabytes() -> None:
    files = {file.name: file.stat().st_size for file in FOLDER.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(files)
    assert sum(files.values()) <= 12e6
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    # 20 times a power of two
    assert config["intermediate_size"] == 20 * 32


def test_it_has_learned_more_than_xz_finds(shipped_artifact: Path) -> None:
    whole = held_out_text()
    # xz gains from length, so it gets all of the text
    xz = 8 * len(lzma.compress(whole.encode(), preset=9 | lzma.PRESET_EXTREME)) / len(whole.encode())
    text = whole[:20_000]
    # windows without overlap: half the time of the default, and a little harder on the model
    result = evaluate(load(shipped_artifact), text, stride=1024)
    assert result.bytes == len(text.encode())
    assert result.bits_per_byte < xz


@pytest.mark.usefixtures("interpreted_gpu")
def test_optimized_once_it_says_the_same_by_the_kernels_of_both_devices(shipped_artifact: Path, tmp_path: Path) -> None:
    matrix = {"format": "fp6-e2m3", "group": 128}
    steps = [
        {"step": "canonicalize"},
        {"step": "quantize_weights", "linear": matrix, "lm_head": matrix},
        {"step": "quantize_kv", "storage": "int4", "page": 16, "sink_pages": 0, "recent_pages": 0},
    ]
    recipe = Recipe.model_validate({"name": "both", "steps": steps})
    optimize(shipped_artifact, recipe, tmp_path / "both", target="ort-cuda", run=False)
    prompt = "class Stack:\n    def push(self, item):\n        self.items.append("
    devices: tuple[Device, ...] = ("cpu", "cuda")
    texts = [generate(load(tmp_path / "both", device=device), prompt, max_new_tokens=3) for device in devices]
    assert texts[0] == texts[1]
    assert len(texts[0][0].tokens) == 3


@pytest.mark.parametrize("batch", [1, 3])
def test_the_export_agrees_with_transformers_in_prefill_and_step_by_step(shipped_artifact: Path, batch: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    ids = np.random.default_rng(batch).integers(0, 4096, (batch, 24))
    mask = np.ones_like(ids)
    for row in range(1, batch):
        mask[row, : 4 * row] = 0
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    positions = np.maximum(mask.cumsum(-1) - 1, 0)
    with torch.no_grad():
        expected = model(torch.tensor(ids), torch.tensor(mask), torch.tensor(positions)).logits.numpy()
    session = open_session(shipped_artifact / MODEL)
    interface = Interface.of_session(session)
    for steps in ([24], [16] + [1] * 8):
        past, start, pieces = interface.empty_past(batch), 0, []
        for length in steps:
            end = start + length
            feeds = interface.feeds(ids[:, start:end], mask[:, :end], past)
            logits, *present = session.run(["logits", *interface.present], feeds)
            past, start = dict(zip(interface.past, present, strict=True)), end
            pieces.append(logits)
        result, real = np.concatenate(pieces, 1), mask.astype(bool)
        # the bound, relative to the largest logit; float32 through 6 layers, seen 1e-6
        assert np.abs(result - expected)[real].max() < 1e-4 * np.abs(expected[real]).max()


def test_int4_takes_the_nominal_bits_of_the_whole_folder(shipped_artifact: Path, tmp_path: Path) -> None:
    result = optimize(shipped_artifact, "rotate-int4-rtn", tmp_path / "int4")
    # 6 layers of 4.25-bit matrices in groups of 64, 8.125 bits for the head in groups of 128 and for the embedding,
    # whose rows have a float32 scale
    width, mlp, kv, vocabulary = 256, 640, 128, 4096
    matrices = 6 * width * (2 * width + 2 * kv + 3 * mlp)
    nominal = (4.25 * matrices + vocabulary * width * (8.125 + 8.125) + 32 * 13 * width) / 8
    assert (tmp_path / "int4" / DATA).stat().st_size == nominal
    # the graph itself; seen 3.4% of it
    assert (tmp_path / "int4" / MODEL).stat().st_size < 0.04 * nominal
    assert result.manifest.check("kernels").figures == {"quantized_products": 43, "fused_kernels": 43}
