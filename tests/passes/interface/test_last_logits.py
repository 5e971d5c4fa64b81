from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.compile.pipeline import optimize
from graphopt.compile.replay import verify
from graphopt.errors import InputError
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.decoding.proposers import Lookup
from graphopt.inference.decoding.speculation import Speculation
from graphopt.inference.generation import generate
from graphopt.inference.session import load
from graphopt.passes.codes.quantize_weights import LinearFormat, QuantizeWeights
from graphopt.passes.interface.last_logits import LastLogits
from graphopt.quality.evaluation import evaluate
from tests.graphs import logits, residual_model


def last(model: ir.Model) -> Any:
    return LastLogits()(model).report


@pytest.mark.parametrize("given", [{}, {"biases": True}, {"tied": True}])
def test_the_logits_of_the_last_position_stay(given: dict[str, bool], tmp_path: Path) -> None:
    model = residual_model(**given)  # type: ignore[arg-type]
    before = logits(model, tmp_path / "before")
    report = last(model)
    assert len(report.changes) == 1
    assert list(model.graph.outputs[0].shape) == ["batch", 1, 24]
    after = logits(model, tmp_path / "after")
    # a product of fewer rows may sum in another order
    assert after.shape == (3, 1, 24)
    assert np.abs(after[:, 0] - before[:, -1]).max() < 1e-6 * np.abs(before).max()


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_a_head_of_codes_is_cut_too(name: str, tmp_path: Path) -> None:
    model = residual_model(width=32)
    QuantizeWeights(linear=None, lm_head=LinearFormat(format=name, group=16))(model)
    before = logits(model, tmp_path / "before")
    last(model)
    # as above, and onnxruntime may take another kernel for one row
    assert np.abs(logits(model, tmp_path / "after")[:, 0] - before[:, -1]).max() < 1e-5 * np.abs(before).max()


def test_soft_caps_are_gone_through(make_artifact: Callable[[str], Path], tmp_path: Path) -> None:
    made = optimize(make_artifact("gemma2"), "rotate", tmp_path / "out", last_logits=True)
    report = next(report for report in made.manifest.passes if report.name == "last_logits")
    assert "only the last position" in str(report.changes[0].what)
    assert made.manifest.checks[-1].figures["largest_change"] < 1e-6


def test_it_is_exact_for_text_and_evaluation_is_refused(llama_artifact: Path, tmp_path: Path) -> None:
    optimize(llama_artifact, "int4-rtn", tmp_path / "all")
    made = optimize(llama_artifact, "int4-rtn", tmp_path / "last", last_logits=True)
    assert any("[batch, 1, vocabulary]" in note for note in map(str, made.manifest.notes))
    before, after = load(tmp_path / "all"), load(tmp_path / "last")
    prompts = ["def f(x):", "import os, sys\nfor a in b:"]
    texts = [[each.text for each in generate(session, prompts, max_new_tokens=12)] for session in (before, after)]
    assert texts[0] == texts[1]
    with pytest.raises(InputError, match="last_logits of its recipe int4.*every position"):
        evaluate(after, "some text")
    with pytest.raises(InputError, match="last position only"):
        after.logits(np.zeros((1, 4), np.int64))


def test_before_and_after_are_compared_where_both_have_logits(llama_artifact: Path, tmp_path: Path) -> None:
    optimize(llama_artifact, "rotate", tmp_path / "last", last_logits=True)
    checks = verify(llama_artifact, tmp_path / "last").checks
    assert [check.status for check in checks] == ["proved", "proved", "measured"]
    # each weight is rounded once more by the rotation; seen 1.2e-6
    assert checks[-1].figures["largest_change"] < 1e-5


def test_logits_of_the_last_positions_check_drafts(llama_artifact: Path, tmp_path: Path) -> None:
    made = optimize(llama_artifact, "rotate", tmp_path / "four", last_logits=4, quality_tokens=0)
    assert made.manifest.checks[-1].figures["largest_change"] < 1e-5
    assert any("last 4 positions" in note for note in map(str, made.manifest.notes))
    session = load(tmp_path / "four", threads=1)
    assert session.interface.last_logits == 4
    assert [Decoder(session, 1).step(np.zeros((1, length), np.int64)).shape[1] for length in (1, 3, 4, 9)] == [
        1,
        3,
        4,
        4,
    ]
    speculation = Speculation(Lookup(), 11)
    plain = generate(session, [[1, 2, 3, 1, 2]], max_new_tokens=30)
    assert generate(session, [[1, 2, 3, 1, 2]], max_new_tokens=30, proposer=speculation) == plain
    assert max(speculation.stats.widths) <= 4  # each guess needs logits of its own position
    with pytest.raises(InputError, match="the last 4 positions only"):
        evaluate(session, "some text")


def test_drafts_need_more_than_the_last_position(llama_artifact: Path, tmp_path: Path) -> None:
    optimize(llama_artifact, "rotate", tmp_path / "one", last_logits=True, quality_tokens=0)
    session = load(tmp_path / "one", threads=1)
    with pytest.raises(InputError, match="last position only.*--last-logits 12"):
        generate(session, [[1]], proposer=Lookup())
    speculation = Speculation(Lookup(), strict=True)
    assert generate(session, [[1]], max_new_tokens=3, proposer=speculation) == generate(
        session, [[1]], max_new_tokens=3
    )
    assert "no drafts: the model computes logits of the last position only" in speculation.stats.notes[0]


def test_a_second_time_changes_nothing() -> None:
    model = residual_model()
    last(model)
    assert [str(skip.reason) for skip in last(model).skips] == ["they are of one position already"]


def test_logits_that_more_than_a_head_makes_are_left_alone() -> None:
    model = residual_model()
    output = model.graph.outputs[0]
    shape = ir.node("Softmax", [output], {"axis": 1}, name="mixed")
    made = shape.outputs[0]
    made.shape, made.dtype = output.shape, output.dtype
    output.name, made.name = "scores", "logits"
    model.graph.append(shape)
    model.graph.outputs[0] = made
    assert [str(skip.reason) for skip in last(model).skips] == [
        "Softmax mixed stands behind the product that makes them"
    ]


def test_logits_that_the_graph_reads_itself_are_left_alone() -> None:
    model = residual_model()
    output = model.graph.outputs[0]
    best = ir.node("ArgMax", [output], name="best")
    best.outputs[0].name = "choice"
    model.graph.append(best)
    model.graph.outputs.append(best.outputs[0])
    assert [str(skip.reason) for skip in last(model).skips] == ["logits is read elsewhere too"]
