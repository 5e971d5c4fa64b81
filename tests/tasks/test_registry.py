"""A task is one file: a kind of model without tokens, from its file to the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt import cli
from graphopt.artifact.manifest import read_manifest
from graphopt.errors import InputError
from graphopt.tasks import TASKS, task_of_ports
from tests.registry_files import file_added

FILE = '''
"""Scores of rows of numbers."""
import json
from dataclasses import dataclass
import numpy as np
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Rule
from graphopt.ort.session import run
from graphopt.tasks.base import Task

ROWS = Rule("tests.scorer-rows", "{rows} random rows")

@dataclass(frozen=True)
class ScorerProbe:
    feeds: dict
    real: np.ndarray

    @property
    def tokens(self):
        return ROWS(rows=len(self.real))

    def run(self, session):
        return run(session, ["scores"], self.feeds)[0].astype(np.float64)

    def matching_rows(self, before, after):
        return before

    def figures(self, first, after):
        return {"same_best_share": float((first.argmax(-1) == after.argmax(-1)).mean())}

class Scorer(Task):
    """Rows of numbers in, scores out."""
    name, noun, quantity, output = "scorer", "a scorer", "scores", "scores"

    def matches(self, inputs, outputs):
        return "features" in inputs and "scores" in outputs

    def check(self, graph):
        if len(graph.inputs) != 1:
            raise InputError("a scorer has one input, features")

    def probe(self, graph, *, context=0):
        rows = np.random.default_rng(0).standard_normal((8, graph.inputs[0].shape[1])).astype(np.float32)
        return ScorerProbe({"features": rows}, np.ones(8, bool))

    def print_run(self, opened, inputs, as_json):
        """Each input is a row of numbers, as JSON."""
        rows = np.array([json.loads(row) for row in inputs], np.float32)
        print(run(opened.inference, ["scores"], {"features": rows})[0].argmax(-1).tolist())

SCORER = Scorer()
'''


def main(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["graphopt", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    streams = capsys.readouterr()
    return int(stop.value.code or 0), streams.out + streams.err


def scorer() -> ir.Model:
    random = np.random.default_rng(0)
    features = ir.Value(name="features", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 64]))
    weights = {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in (("up", (64, 128)), ("down", (128, 32)))
    }
    values = {
        name: ir.Value(
            name=name,
            const_value=ir.tensor(array, name=name),
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(array.shape),
        )
        for name, array in weights.items()
    }
    up = ir.node("MatMul", [features, values["up"]], name="up")
    act = ir.node("Relu", [up.outputs[0]], name="act")
    down = ir.node("MatMul", [act.outputs[0], values["down"]], name="down")
    for node, width in ((up, 128), (act, 128), (down, 32)):
        node.outputs[0].name = f"{node.name}.out"
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", width])
    down.outputs[0].name = "scores"
    graph = ir.Graph(
        [features],
        [down.outputs[0]],
        nodes=[up, act, down],
        initializers=list(values.values()),
        opset_imports={"": 23},
        name="g",
    )
    return ir.Model(graph, ir_version=10)


def test_a_file_is_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = tmp_path / "scorer.onnx", tmp_path / "out"
    (tmp_path / "files").mkdir()
    ir.save(scorer(), model)
    row = np.random.default_rng(1).standard_normal(64).round(3).tolist()
    with file_added(TASKS, "graphopt.tasks", tmp_path / "files", FILE):
        assert task_of_ports(["features"], ["scores"]).name == "scorer"
        code, text = main(capsys, monkeypatch, "optimize", model, "-o", out, "-r", "fp6-rtn")
        assert code == 0, text
        manifest = read_manifest(out)
        assert manifest.task == "scorer"
        (check,) = [check for check in manifest.checks if check.after == "quantize_weights"]
        assert check.status == "measured"
        assert check.figures["largest_change"] < 0.05  # steps of fp6 are up to 1/16 of a weight
        quality = next(check for check in manifest.checks if check.name == "quality")
        assert (quality.status, "a scorer has no measure of quality" in str(quality.reason)) == ("not covered", True)
        code, text = main(capsys, monkeypatch, "inspect", out, "--json")
        assert code == 0, text
        code, text = main(capsys, monkeypatch, "run", out, "--prompt", json.dumps(row))
        hidden = np.maximum(np.array(row) @ scorer().graph.initializers["up"].const_value.numpy(), 0)
        best = (hidden @ scorer().graph.initializers["down"].const_value.numpy()).argmax()
        assert (code, text.strip()) == (0, f"[{best}]")
        code, text = main(capsys, monkeypatch, "run", out, "--prompt", json.dumps(row), "--top-k", 3)
        assert (code, "a scorer generates nothing" in text) == (2, True)
        code, text = main(capsys, monkeypatch, "eval", out, "--held-out")
        assert (code, "a scorer has nothing that `graphopt eval` measures" in text) == (2, True)
        code, text = main(capsys, monkeypatch, "optimize", model, "-o", tmp_path / "no", "-r", "int4")
        assert (code, "tokenizer" in text) == (2, True)  # GPTQ wants statistics of text
        with pytest.raises(InputError, match="a scorer reads no text, and 6 tokens"):
            TASKS["scorer"].text_feeds(scorer().graph, np.zeros((2, 3), np.int64))
        assert not list(TASKS["scorer"].calls(scorer().graph, [(1, 2, 3)]))
    assert "scorer" not in TASKS
    with pytest.raises(InputError, match=r"no task 'scorer'; known are audio_classifier, .*, graph"):
        read_manifest(out)
