"""The one runner: parts of a graph, run on their own and once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.ort import runner as running
from graphopt.ort.runner import Runner, part_of
from tests.graphs import residual_model, save


@pytest.fixture
def opened_models(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The sessions that were opened."""
    models: list[object] = []
    real = running.session_of

    def record_session(model: ir.Model, **options: object) -> object:
        models.append(model)
        return real(model, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(running, "session_of", record_session)
    return models


def test_a_part_is_run_once_for_the_same_content(opened_models: list[object]) -> None:
    model, runner = residual_model(), Runner()
    value = next(node for node in model.graph if node.name == "up0").outputs[0]
    ids = [{"input_ids": np.array([[1, 2, 3]]), "unused": np.zeros(1)}, {"input_ids": np.array([[4]])}]
    results = runner.run(part_of(model, value), ids)
    assert [[output.shape for output in outputs] for outputs in results] == [[(1, 3, 12)], [(1, 1, 12)]]
    copy = model.clone()
    second_results = runner.run(part_of(copy, next(node for node in copy.graph if node.name == "up0").outputs[0]), ids)
    assert len(opened_models) == 1
    np.testing.assert_array_equal(results[0][0], second_results[0][0])
    # Another input, and another weight, are other contents.
    runner.run(part_of(model, value), ids[1:])
    model.graph.initializers["up0.weight"].const_value = ir.tensor(np.ones((16, 12), np.float32))
    other_results = runner.run(part_of(model, value), ids)
    assert len(opened_models) == 3
    assert np.abs(other_results[0][0] - results[0][0]).max() > 0.1


def test_a_part_has_the_inputs_that_it_reads() -> None:
    model = residual_model()
    part = part_of(model, model.graph.initializers["table"])
    assert list(part.graph.inputs) == []


def test_what_onnxruntime_refuses_is_raised_and_not_kept(opened_models: list[object]) -> None:
    model, runner = residual_model(), Runner()
    part = part_of(model, model.graph.outputs[0])
    for _ in range(2):
        with pytest.raises(Exception, match="(?i)indices|out of"):
            runner.run(part, [{"input_ids": np.array([[999]])}])
    assert len(opened_models) == 2


def test_a_whole_model_is_opened_from_a_file_or_from_memory(tmp_path: Path) -> None:
    model, runner = residual_model(), Runner(native=False)
    feeds = {"input_ids": np.array([[1, 2]])}
    with runner.open_model(model) as session:
        expected = session.run(["logits"], feeds)[0]
    np.testing.assert_array_equal(runner.open(save(model, tmp_path)).run(["logits"], feeds)[0], expected)
