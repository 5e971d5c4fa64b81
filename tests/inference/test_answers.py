"""Answers to questions: of a model of random weights end to end, and the choice of a span by its definition."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import graphopt
from graphopt.artifact.manifest import read_manifest
from graphopt.errors import InputError
from graphopt.inference.answers import LONGEST, answers, best_span, question_answerer_of
from graphopt.inference.session import open_folder
from tests.cli.test_embeddings import call

QUESTION, TEXT = "what is imported", "import os and class Stack"
# Float32, run in another order of sums: seen 4e-7.
FLOAT32 = 1e-5


@pytest.fixture(scope="module")
def folder(make_artifact: Callable[[str], Path]) -> Path:
    return make_artifact("distilbert_answers")


def test_logits_are_those_of_transformers(folder: Path, make_folder: Callable[[str], Path]) -> None:
    import torch
    import transformers

    session = graphopt.load_classifier(folder)
    model = transformers.DistilBertForQuestionAnswering.from_pretrained(make_folder("distilbert_answers")).eval()
    encodings = session.encode([(QUESTION, TEXT), ("a", "b")])
    for encoding, logits in zip(encodings, session.logits(encodings), strict=True):
        with torch.no_grad():
            output = model(torch.tensor([encoding.ids]))
        expected = torch.stack([output.start_logits[0], output.end_logits[0]], dim=-1).numpy()
        np.testing.assert_allclose(logits, expected, atol=FLOAT32, rtol=0)


def test_an_answer_is_the_likeliest_part_of_the_text(folder: Path) -> None:
    session = question_answerer_of(open_folder(folder))
    (encoding,) = session.encode([(QUESTION, TEXT * 4)])
    begin = encoding.sequence_ids.index(1)
    logits = np.zeros((len(encoding.ids), 2), np.float32)
    logits[0] = 100  # the question is no answer
    logits[begin + 4, 0], logits[begin + 2, 1], logits[begin + 6, 1] = 50, 49, 48
    assert best_span(encoding, logits)[:2] == (begin + 4, begin + 6)  # it does not end before it begins
    logits[:, 1] = 0
    logits[begin + 4 + LONGEST, 1] = 40
    first, last, _ = best_span(encoding, logits)
    assert (first, last - first < LONGEST) == (begin + 4, True)
    (answer,) = answers(session, [(QUESTION, TEXT)])
    assert TEXT[answer.begin : answer.end] == answer.text != ""
    assert 0 < answer.probability <= 1
    with pytest.raises(InputError, match="the text that a question is about is empty"):
        answers(session, [(QUESTION, "")])


def test_a_verdict_run_and_eval_compare_answers(
    folder: Path,
    make_artifact: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    graphopt.optimize(folder, "rotate-fp6", tmp_path / "out")
    check = read_manifest(tmp_path / "out").check("quality")
    # Random weights in 6 bits: spans of nearly equal products swap.
    assert check.figures["kl_mean"] < 0.05
    assert check.figures["same_first_choice"] > 0.8
    assert "same answer" in str(check.reason)
    code, out, _ = call(monkeypatch, capsys, "run", folder, "--prompt", f"{QUESTION}\t{TEXT}", "--json")
    (row,) = json.loads(out)
    assert (code, row["question"], row["answer"] in TEXT) == (0, QUESTION, True)
    code, _, err = call(monkeypatch, capsys, "run", folder, "--prompt", QUESTION)
    assert (code, "has no tab between a question" in err) == (2, True)
    text = tmp_path / "text.txt"
    text.write_text("import os\nclass Stack:\n")
    code, out, _ = call(monkeypatch, capsys, "eval", folder, "--reference", folder, "--text", text, "--json")
    assert (code, json.loads(out)) == (0, {"kl_mean": 0, "same_first_choice": 1, "texts": 2})
    code, _, err = call(monkeypatch, capsys, "eval", folder, "--text", text)
    assert (code, "no reference was given" in err) == (2, True)
    with pytest.raises(InputError, match="of the kind classifier, which answers no questions"):
        question_answerer_of(open_folder(make_artifact("bert_classes")))
