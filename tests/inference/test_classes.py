"""Classifiers, classifiers of tokens and rerankers of random weights, end to end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import graphopt
from graphopt.artifact import artifact
from graphopt.artifact.manifest import read_manifest
from graphopt.compile.replay import verify
from graphopt.errors import InputError, VerificationError
from graphopt.graph.weights.data_file import save_model
from graphopt.inference.classes import Text
from graphopt.quality.classes import class_agreement
from graphopt.tasks import task_of_ports
from graphopt.tasks.ports import Port
from tests.cli.test_embeddings import call
from tests.families import HEADS

ENCODERS = ["bert_classes", "modernbert_reranker", "roberta_tokens"]
CLASSIFIERS = [*ENCODERS, "llama_classes"]
TEXTS: list[Text] = ["import os", ("def read(path)", "return open(path).read()"), "class Stack:", ("a", "b c d e")]
# Float32, run in another order of sums: seen 7e-7.
FLOAT32 = 1e-5


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_logits_are_those_of_transformers_for_texts_and_pairs(
    family: str, make_artifact: Callable[[str], Path], make_folder: Callable[[str], Path]
) -> None:
    import torch
    import transformers

    session = graphopt.load_classifier(make_artifact(family))
    (check,) = read_manifest(make_artifact(family)).checks
    assert (check.status, check.figures["largest_change"] <= FLOAT32) == ("measured", True)
    encodings = session.encode(TEXTS)
    model = getattr(transformers, HEADS[family][0]).from_pretrained(make_folder(family)).eval()
    for encoding, logits in zip(encodings, session.logits(encodings), strict=True):
        feeds = {"input_ids": torch.tensor([encoding.ids])}
        if "token_type_ids" in session.interface.inputs:
            feeds["token_type_ids"] = torch.tensor([encoding.type_ids])
        with torch.no_grad():
            expected = model(**feeds).logits[0].numpy()
        np.testing.assert_allclose(logits, expected, atol=FLOAT32, rtol=0)
    if session.class_count != 1:
        assert session.probabilities(logits).sum(-1) == pytest.approx(1)
    assert (
        session.labels
        == {
            "bert_classes": ["bad", "neutral", "good"],
            "modernbert_reranker": ["LABEL_0"],
            "roberta_tokens": [f"B-{number}" for number in range(5)],
            "llama_classes": ["bad", "good"],
        }[family]
    )


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_a_verdict_compares_classes_and_rankings(
    family: str, make_artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = make_artifact(family)
    manifest = graphopt.optimize(folder, "rotate-fp6", tmp_path / "out").manifest
    quality = next(check for check in manifest.checks if check.name == "quality")
    assert quality.status == "measured"
    assert ("rank_correlation" in quality.figures) == (family == "modernbert_reranker")
    # Random weights in 6 bits; trained ones decide by larger margins.
    assert 0 < quality.figures["kl_mean"] < 0.05
    # A reranker has four queries here, and scores of random weights lie close.
    share = quality.figures.get("rank_correlation", quality.figures["same_first_choice"])
    assert 0.8 < share <= 1
    assert all(check.status == "measured" for check in manifest.checks if check.name == "logits of classes")
    assert "measured" in {check.status for check in verify(folder, tmp_path / "out").checks}
    with pytest.raises(VerificationError, match=r"kl is .*nothing was written"):
        graphopt.optimize(folder, "rotate-fp6", tmp_path / "no", require="kl<1e-9")


def test_a_model_agrees_with_itself_and_refuses_another(make_artifact: Callable[[str], Path], tmp_path: Path) -> None:
    classes, reranker, tokens = (graphopt.load_classifier(make_artifact(family)) for family in ENCODERS)
    sentences = ["import os", "class Stack:", "def f(x): return x", "for line in file: " * 50]
    for session in (classes, reranker, tokens):
        figures = class_agreement(session, session, sentences)
        assert (figures["kl_mean"], figures["same_first_choice"], figures.get("rank_correlation", 1)) == (0, 1, 1)
    assert class_agreement(reranker, reranker, sentences)["texts"] == 2 * 2  # two queries, two documents
    with pytest.raises(InputError, match="the reference has 3 classes, the model 1"):
        class_agreement(reranker, classes, sentences)
    with pytest.raises(InputError, match="too few sentences"):
        class_agreement(reranker, reranker, sentences[:2])
    with pytest.raises(InputError, match=r"longer than the model's 128 positions"):
        classes.encode(sentences)
    with pytest.raises(InputError, match="of the kind classifier, which makes no embeddings"):
        graphopt.load_encoder(make_artifact("bert_classes"))
    with pytest.raises(InputError, match="of the kind encoder, which has no classes"):
        graphopt.load_classifier(make_artifact("nomic_bert"))
    bare_folder = tmp_path / "other"
    shutil.copytree(make_artifact("bert_classes"), bare_folder)
    (bare_folder / "tokenizer.json").unlink()
    (bare_folder / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"no tokenizer\.json, so it can read no text"):
        graphopt.load_classifier(bare_folder).encode(["a"])


def test_several_classes_may_hold_at_once(make_artifact: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "several"
    shutil.copytree(make_artifact("bert_classes"), folder)
    (folder / "manifest.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"problem_type": "multi_label_classification"}))
    session = graphopt.load_classifier(folder)
    assert session.has_independent_classes
    np.testing.assert_allclose(session.probabilities(np.float32([0, 100, -100])), [0.5, 1, 0], atol=1e-12)
    assert class_agreement(session, session, ["import os"])["same_first_choice"] == 1


def test_run_and_eval_print_classes_and_ranks(
    make_artifact: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    classes, reranker, tokens = map(make_artifact, ENCODERS)
    prompts = ("--prompt", "import os", "--prompt", "class Stack:", "--prompt", "def f(x)")
    code, out, _ = call(monkeypatch, capsys, "run", classes, *prompts, "--json")
    rows = json.loads(out)
    assert (code, len(rows), {row["class"] for row in rows} <= {"bad", "neutral", "good"}) == (0, 3, True)
    assert all(row["probability"] == max(row["probabilities"].values()) for row in rows)
    code, out, _ = call(monkeypatch, capsys, "run", reranker, *prompts, "--json")
    scores = [row["score"] for row in json.loads(out)]
    assert (code, len(scores), {row["query"] for row in json.loads(out)}) == (0, 2, {"import os"})
    assert scores == sorted(scores, reverse=True)
    code, out, _ = call(monkeypatch, capsys, "run", tokens, *prompts)
    assert (code, "B-" in out, "[CLS]" in out) == (0, True, False)
    code, _, err = call(monkeypatch, capsys, "run", tokens, *prompts, "--top-k", 3)
    assert (code, "a classifier of tokens generates nothing" in err) == (2, True)
    text = tmp_path / "text.txt"
    text.write_text("import os\nclass Stack:\ndef f(x)\n")
    code, out, _ = call(monkeypatch, capsys, "eval", reranker, "--reference", reranker, "--text", text, "--json")
    assert (code, json.loads(out)["rank_correlation"]) == (0, 1)
    code, _, err = call(monkeypatch, capsys, "eval", classes, "--text", text)
    assert (code, "no reference was given" in err) == (2, True)


@pytest.mark.parametrize("family", ["bert_classes", "roberta_tokens"])
def test_a_classifier_of_another_exporter_calls_its_output_logits(
    family: str, make_artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    model = artifact.read(make_artifact(family)).model
    model.graph.outputs[0].name = "logits"
    folder = tmp_path / "other"
    shutil.copytree(make_artifact(family), folder)
    (folder / "manifest.json").unlink()
    save_model(model, folder / "model.onnx", "model.onnx.data")
    manifest = graphopt.optimize(folder / "model.onnx", "rotate-fp6", tmp_path / "out").manifest
    name = {"bert_classes": "logits_classifier", "roberta_tokens": "logits_token_classifier"}[family]
    assert (manifest.task, manifest.check("quality").status) == (name, "measured")
    assert manifest.check("certificate", after="rotate").status == "proved"
    assert graphopt.export(folder, tmp_path / "again").task == name
    session, reference = graphopt.load_classifier(tmp_path / "again"), graphopt.load_classifier(make_artifact(family))
    encodings = session.encode(TEXTS)
    for row, expected in zip(session.logits(encodings), reference.logits(encodings), strict=True):
        np.testing.assert_array_equal(row, expected)


def test_logits_of_many_tokens_or_with_a_cache_are_those_of_a_language_model() -> None:
    int64, float32 = np.dtype(np.int64), np.dtype(np.float32)
    ids = {"input_ids": Port("input_ids", int64, (None, None))}

    def task(shape: tuple[int | None, ...], *port_names: str) -> str:
        return task_of_ports({**ids, **dict.fromkeys(port_names)}, {"logits": Port("logits", float32, shape)}).name

    assert task((None, 3)) == "logits_classifier"
    assert task((None, None, 9), "attention_mask") == "logits_token_classifier"
    # without a mask it reads from left to right, whatever its vocabulary
    assert task((None, None, 9)) == "causal_lm"
    assert (
        task((None, None, 256), "attention_mask") == task((None, None, 256)) == task((None, None, None)) == "causal_lm"
    )
    assert task((None, 9), "past_key_values.0.key") == task((None, 300), "block_table") == "causal_lm"


def test_a_decoder_without_a_token_for_padding_is_refused(make_folder: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(make_folder("llama_classes"), tmp_path / "folder")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    with pytest.raises(InputError, match=r"LlamaForSequenceClassification finds the last token.*set pad_token_id"):
        graphopt.export(tmp_path / "folder", tmp_path / "out")
    assert not (tmp_path / "out").exists()
