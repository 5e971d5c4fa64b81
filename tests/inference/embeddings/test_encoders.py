"""A BERT of random weights, end to end: exported, optimized, run, compared, and what is refused on the way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphopt.analysis.structure.ports import ATTENTION_MASK, HIDDEN, INPUT_IDS, TOKEN_TYPE_IDS
from graphopt.artifact import artifact
from graphopt.artifact.genai import GENAI_CONFIG
from graphopt.artifact.manifest import read_manifest
from graphopt.compile.pipeline import optimize
from graphopt.compile.replay import verify
from graphopt.errors import InputError
from graphopt.inference.embeddings import evaluate_embeddings, load_encoder
from graphopt.inference.session import load
from graphopt.passes.recipe import Recipe
from graphopt.tasks import task_of
from tests.graphs import run_pass

TEXTS = ["import os", "def read_lines(path): return open(path).read()", "class Stack:", "import sys"]
# Float32, run in another order of sums: seen 4e-7.
FLOAT32 = 1e-5
ROWS = {"[batch,length]", "[batch,1,length]", "[batch,length,1]"}


def test_an_encoder_is_exported_with_its_own_ports_and_agrees_with_transformers(bert_artifact: Path) -> None:
    graph, manifest = artifact.read(bert_artifact).model.graph, read_manifest(bert_artifact)
    assert manifest.task == task_of(graph).name == "encoder"
    assert [value.name for value in graph.inputs] == [INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS]
    assert {str(value.shape) for value in graph.inputs} == {"[batch,length]"}
    assert str(next(value for value in graph.outputs if value.name == HIDDEN).shape) == "[batch,length,64]"
    (check,) = manifest.checks
    assert check.status == "measured"
    assert check.figures["largest_change"] <= FLOAT32
    assert not (bert_artifact / GENAI_CONFIG).exists()
    (note,) = manifest.notes
    assert note.code == "artifact.no-genai-config"
    assert "makes hidden states" in str(note)


def test_embeddings_are_means_over_the_tokens_of_a_text(
    bert_artifact: Path, make_folder: Callable[[str], Path]
) -> None:
    import torch
    import transformers

    session = load_encoder(bert_artifact)
    embeddings = session.embed(TEXTS)
    model = transformers.AutoModel.from_pretrained(make_folder("bert")).eval()
    for text, embedding in zip(TEXTS, embeddings, strict=True):
        ids = session.encode(text)
        assert (ids[0], ids[-1]) == (2, 3)
        with torch.no_grad():
            states = model(torch.tensor([ids])).last_hidden_state[0].numpy()
        np.testing.assert_allclose(embedding, states.mean(0), atol=FLOAT32, rtol=0)


INT8 = {"step": "quantize_weights", "linear": {"format": "int8"}}


@pytest.mark.parametrize(
    ("recipe", "smallest", "share"),
    [
        # Rotations change rounding only.
        ("rotate", 1 - 1e-6, 1.01),
        (Recipe.model_validate({"name": "int8", "steps": [{"step": "canonicalize"}, INT8]}), 0.9995, 0.5),
        ("rotate-fp6", 0.99, 0.5),
        ("rotate-int4-rtn", 0.97, 0.5),
    ],
    ids=["rotate", "int8", "rotate-fp6", "rotate-int4-rtn"],
)
def test_presets_make_an_encoder_smaller_and_keep_its_embeddings(
    recipe: str | Recipe, smallest: float, share: float, bert_artifact: Path, tmp_path: Path
) -> None:
    """What is lost is that of random weights in groups of 64 or less, which is more than trained ones lose."""
    outcome = optimize(bert_artifact, recipe, tmp_path / "out")
    assert outcome.manifest.task == "encoder"
    hidden_checks = [check for check in outcome.manifest.checks if check.name == "hidden states"]
    assert {check.after for check in hidden_checks} == {report.name for report in outcome.manifest.passes}
    assert all(check.status == "measured" and "cosine_with_start_smallest" in check.figures for check in hidden_checks)
    if "rotate" in str(recipe):
        assert outcome.manifest.check("certificate", after="rotate").status == "proved"
    text = "\n".join([*TEXTS, "", TEXTS[0], "import " * 200])
    result = evaluate_embeddings(load_encoder(tmp_path / "out"), load_encoder(bert_artifact), text)
    assert (result.texts, result.cut, result.width) == (5, 1, 64)
    assert smallest <= result.cosine_smallest <= result.cosine_1_percent <= result.cosine_mean <= 1 + 1e-12
    assert result.cosine_smallest < 1
    size, before = ((folder / artifact.DATA).stat().st_size for folder in (tmp_path / "out", bert_artifact))
    assert size <= share * before


def test_an_optimized_encoder_is_verified_from_the_two_folders(bert_artifact: Path, tmp_path: Path) -> None:
    optimize(bert_artifact, "rotate", tmp_path / "out")
    statuses = {check.name: check.status for check in verify(bert_artifact, tmp_path / "out").checks}
    assert (statuses["certificate"], statuses["hidden states"]) == ("proved", "measured")


def test_the_mask_of_an_encoder_means_padding(bert_artifact: Path) -> None:
    model = artifact.read(bert_artifact).model
    report = run_pass(model, "canonicalize")
    nodes = [node for node in model.graph if node.op_type == "Attention"]
    assert len(nodes) == 2
    assert {mask.name for node in nodes if (mask := node.inputs[3]) is not None} == {"padding_mask"}
    assert all(node.attributes.get_int("is_causal", 0) == 0 for node in nodes)
    assert sum("(padding)" in str(change.what) for change in report.changes) == 2
    assert not [node for node in model.graph if node.op_type in ("Where", "GatherND")]
    assert report.skips == []


@pytest.mark.parametrize("step", ["quantize_kv", "sparse_kv", "page_kv", "last_logits"])
def test_steps_for_caches_and_logits_say_that_there_are_none(step: str, bert_artifact: Path) -> None:
    model = artifact.read(bert_artifact).model
    run_pass(model, "canonicalize")
    before = [node.name for node in model.graph]
    report = run_pass(model, step)
    assert report.skips
    assert not report.changes
    assert [node.name for node in model.graph] == before
    assert {str(skip.reason) for skip in report.skips} <= {
        "it has no cache of its own among the inputs of the graph",
        "the graph has no output of this name",
    }


def test_what_is_no_encoder_or_no_text_is_refused(bert_artifact: Path, llama_artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"of the kind encoder, which makes no text.*load_encoder"):
        load(bert_artifact)
    with pytest.raises(InputError, match=r"of the kind causal_lm, which makes no embeddings"):
        load_encoder(llama_artifact)
    session = load_encoder(bert_artifact)
    with pytest.raises(InputError, match=r"a text of \d+ tokens is longer than the model's 128 positions"):
        session.embed(["import " * 200])
    with pytest.raises(InputError, match="no line to embed"):
        evaluate_embeddings(session, session, " \n\n")
    bare_folder = tmp_path / "other"
    shutil.copytree(bert_artifact, bare_folder)
    (bare_folder / "manifest.json").unlink()
    tokenizer = json.loads((bare_folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = None
    (bare_folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match="the reference has another tokenizer"):
        evaluate_embeddings(session, load_encoder(bare_folder), "import os")
    (bare_folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"no tokenizer\.json, so it can read no text"):
        load_encoder(bare_folder).embed(["import os"])


@pytest.mark.parametrize("family", ["modernbert_reranker", "nomic_bert", "eurobert"])
def test_rotary_encoders_count_positions_for_each_row(
    family: str, make_artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = make_artifact(family)
    model, (check,) = artifact.read(folder).model, read_manifest(folder).checks
    assert check.status == "measured"
    assert check.figures["largest_change"] <= FLOAT32
    assert "position_ids" not in {value.name for value in model.graph.inputs}
    waves = [node.inputs[0] for node in model.graph if node.op_type in ("Cos", "Sin")]
    assert waves
    assert {str(angle.shape)[:6] for angle in waves if angle is not None} == {"[batch"}
    # Positions are repeated once, not for each layer and not for each of query and key.
    expands = [node.outputs[0] for node in model.graph if node.op_type == "Expand"]
    assert len([value for value in expands if str(value.shape) in ROWS]) == 1
    result = optimize(folder, "rotate", tmp_path / "out")
    assert result.manifest.check("certificate", after="rotate").status == "proved"
    assert all(check.status != "not covered" for check in result.manifest.checks if check.after == "rotate")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "bert", "architectures": ["BertModel"]}, "encoder"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "encoder"),
        ({"model_type": "roberta"}, "encoder"),
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, "classifier"),
        ({"model_type": "roberta", "architectures": ["RobertaForTokenClassification"]}, "token_classifier"),
        ({"model_type": "bert", "architectures": ["BertForMultipleChoice"]}, None),
        ({"model_type": "bart", "architectures": ["BartForSequenceClassification"]}, None),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": True}, "causal_lm"),
        ({"model_type": "bert", "architectures": ["BertModel"], "is_decoder": True}, None),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "causal_lm"),
        ({"model_type": "llama", "architectures": ["LlamaModel"]}, "encoder"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "classifier"),
        ({"model_type": "t5", "architectures": ["T5EncoderModel"]}, "encoder"),
        ({"model_type": "clip_text_model", "architectures": ["CLIPTextModel"]}, "encoder"),
        ({"model_type": "clip_text_model", "architectures": ["CLIPTextModelWithProjection"]}, "encoder"),
        ({"model_type": "bert", "architectures": ["BertForQuestionAnswering"]}, "question_answering"),
        ({"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}, "seq2seq"),
    ],
)
def test_the_task_of_a_checkpoint_is_read_from_its_configuration(config: dict[str, Any], kind: str | None) -> None:
    import transformers

    from graphopt.models.checkpoint import quiet, task_of_config

    with quiet():
        assert task_of_config(transformers.AutoConfig.for_model(**config)) == kind
