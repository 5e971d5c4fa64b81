"""Embeddings as checkpoints of sentence-transformers say: pooling, prompts, dense layers, normalization."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphopt
from graphopt.artifact.hf_config import MODULES, PROMPTS, facts_of_encoder, modules_of
from graphopt.artifact.manifest import read_manifest
from graphopt.errors import InputError
from tests.cli.test_embeddings import call

TEXTS = ["import os", "def read_lines(path): return open(path).read()", "class Stack:"]
# Float32, run in another order of sums: seen 2e-6 for T5, whose scores have no factor.
FLOAT32 = 1e-5


def embedder(folder: Path, out: Path, *kinds: str) -> Path:
    """Copy a checkpoint and describe it as sentence-transformers does: last token, a dense layer, normalization."""
    from safetensors.numpy import save_file

    shutil.copytree(folder, out)
    modules = [
        {"idx": number, "path": "" if kind == "Transformer" else f"{number}_{kind}"} | {"type": f"st.models.{kind}"}
        for number, kind in enumerate(("Transformer", *kinds))
    ]
    (out / MODULES).write_text(json.dumps(modules))
    for module in modules[1:]:
        (out / str(module["path"])).mkdir()
    (out / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    prompts = {"query": "class query: ", "document": ""}
    (out / PROMPTS).write_text(json.dumps({"prompts": prompts, "default_prompt_name": None}))
    if "Dense" in kinds:
        config = {"in_features": 64, "out_features": 24, "activation_function": "torch.nn.modules.activation.Tanh"}
        (out / "2_Dense" / "config.json").write_text(json.dumps(config))
        random = np.random.default_rng(0)
        weights = {"linear.weight": random.standard_normal((24, 64)), "linear.bias": random.standard_normal(24)}
        save_file(
            {name: array.astype(np.float32) for name, array in weights.items()}, out / "2_Dense/model.safetensors"
        )
    return out


def test_a_decoder_embeds_as_its_modules_say(
    make_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The checkpoint names a language model, as that of Qwen3-Embedding does."""
    import torch
    import transformers
    from safetensors.numpy import load_file

    source = embedder(make_folder("qwen3_embedder"), tmp_path / "source", "Pooling", "Dense", "Normalize")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    manifest = graphopt.export(source, tmp_path / "out")
    facts = manifest.model
    assert (manifest.task, facts.pooling, facts.is_normalized) == ("encoder", ["lasttoken"], True)
    assert (facts.prompts, facts.default_prompt, len(facts.dense)) == ({"query": "class query: "}, None, 1)
    model = transformers.Qwen3Model.from_pretrained(source).eval()
    weights = load_file(source / "2_Dense" / "model.safetensors")
    graphopt.optimize(tmp_path / "out", "rotate", tmp_path / "rotated")  # the dense layer is carried along
    session = graphopt.load_encoder(tmp_path / "rotated")
    for prompt, front in ((None, ""), ("query", "class query: ")):
        for text, embedding in zip(TEXTS, session.embed(TEXTS, prompt=prompt), strict=True):
            with torch.no_grad():
                state = model(torch.tensor([session.encode(front + text)])).last_hidden_state[0, -1].numpy()
            expected = np.tanh(weights["linear.weight"] @ state + weights["linear.bias"])
            np.testing.assert_allclose(embedding, expected / np.linalg.norm(expected), atol=FLOAT32, rtol=0)
    with pytest.raises(InputError, match=r"no prompt passage.*it has query"):
        session.embed(TEXTS, prompt="passage")
    prompts = ("--prompt", TEXTS[0], "--prompt", TEXTS[1], "--json")
    rows = [
        json.loads(call(monkeypatch, capsys, "run", tmp_path / "rotated", *prompts, *options)[1])[0]["embedding"]
        for options in ([], ["--prompt-name", "query"])
    ]
    np.testing.assert_allclose(rows, [session.embed(TEXTS[:1], prompt=name)[0] for name in (None, "query")], atol=1e-6)
    code, _, err = call(monkeypatch, capsys, "run", tmp_path / "rotated", *prompts, "--prompt-name", "passage")
    assert (code, "no prompt passage" in err) == (2, True)
    (tmp_path / "rotated" / "dense_0.safetensors").unlink()
    (tmp_path / "rotated" / "manifest.json").write_text(manifest.model_copy(update={"files": {}}).model_dump_json())
    with pytest.raises(InputError, match="weights of a layer behind the pooling are not here"):
        graphopt.load_encoder(tmp_path / "rotated").embed(TEXTS)


@pytest.mark.parametrize("family", ["t5_encoder", "clip_text"])
def test_towers_embed_as_transformers_does(
    family: str, make_artifact: Callable[[str], Path], make_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    import torch
    import transformers

    folder = make_artifact(family)
    (check,) = read_manifest(folder).checks
    assert (check.status, check.figures["largest_change"] <= FLOAT32) == ("measured", True)
    kind = {"t5_encoder": "T5EncoderModel", "clip_text": "CLIPTextModelWithProjection"}[family]
    model = getattr(transformers, kind).from_pretrained(make_folder(family)).eval()
    session = graphopt.load_encoder(folder)
    for text, embedding in zip(TEXTS, session.embed(TEXTS), strict=True):
        with torch.no_grad():
            output = model(torch.tensor([session.encode(text)]))
        expected = output.text_embeds[0] if family == "clip_text" else output.last_hidden_state[0].mean(0)
        scale = float(expected.abs().max())
        np.testing.assert_allclose(embedding / scale, expected.numpy() / scale, atol=FLOAT32, rtol=0)
    manifest = graphopt.optimize(folder, "rotate", tmp_path / "out").manifest
    assert manifest.check("certificate", after="rotate").status == "proved"


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([("Transformer", ""), ("Pooling", "1_Pooling"), ("LSTM", "2")], "the module LSTM, which is not known"),
        ([("Transformer", ""), ("Normalize", "1"), ("Pooling", "2_Pooling")], "the module Normalize, which is not"),
        ([("Pooling", "../1_Pooling")], "lies outside of the folder"),
        ([("Dense", "2_Dense")], "the activation ReLU is not known"),
    ],
)
def test_modules_that_are_not_known_are_refused(modules: list[tuple[str, str]], message: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"type": f"sentence_transformers.models.{kind}", "path": p} for kind, p in modules]
    (tmp_path / MODULES).write_text(json.dumps(rows))
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "config.json").write_text('{"activation_function": "torch.nn.ReLU"}')
    with pytest.raises(InputError, match=message):
        facts_of_encoder(tmp_path)


def test_a_list_of_modules_without_paths_is_refused(tmp_path: Path) -> None:
    (tmp_path / MODULES).write_text('[{"type": "Pooling"}]')
    with pytest.raises(InputError, match="does not list modules with type and path"):
        modules_of(tmp_path / MODULES)
    assert modules_of(tmp_path / "absent.json") == []
