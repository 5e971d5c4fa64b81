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
def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The sessions that were opened."""
    found: list[object] = []
    real = running.session_of

    def counted(model: ir.Model, **options: object) -> object:
        found.append(model)
        return real(model, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(running, "session_of", counted)
    return found


def test_a_part_is_run_once_for_the_same_content(opened: list[object]) -> None:
    model, runner = residual_model(), Runner()
    value = next(node for node in model.graph if node.name == "up0").outputs[0]
    ids = [{"input_ids": np.array([[1, 2, 3]]), "unused": np.zeros(1)}, {"input_ids": np.array([[4]])}]
    results = runner.run(part_of(model, value), ids)
    assert [[output.shape for output in outputs] for outputs in results] == [[(1, 3, 12)], [(1, 1, 12)]]
    copy = model.clone()
    again = runner.run(part_of(copy, next(node for node in copy.graph if node.name == "up0").outputs[0]), ids)
    assert len(opened) == 1
    np.testing.assert_array_equal(results[0][0], again[0][0])
    # Another input, and another weight, are other contents.
    runner.run(part_of(model, value), ids[1:])
    model.graph.initializers["up0.weight"].const_value = ir.tensor(np.ones((16, 12), np.float32))
    other = runner.run(part_of(model, value), ids)
    assert len(opened) == 3
    assert np.abs(other[0][0] - results[0][0]).max() > 0.1


def test_a_part_has_the_inputs_that_it_reads() -> None:
    model = residual_model()
    part = part_of(model, model.graph.initializers["table"])
    assert list(part.graph.inputs) == []


def test_what_onnxruntime_refuses_is_raised_and_not_kept(opened: list[object]) -> None:
    model, runner = residual_model(), Runner()
    part = part_of(model, model.graph.outputs[0])
    for _ in range(2):
        with pytest.raises(Exception, match="(?i)indices|out of"):
            runner.run(part, [{"input_ids": np.array([[999]])}])
    assert len(opened) == 2


def test_a_whole_model_is_opened_from_a_file_or_from_memory(tmp_path: Path) -> None:
    model, runner = residual_model(), Runner(native=False)
    feeds = {"input_ids": np.array([[1, 2]])}
    with runner.open_model(model) as session:
        expected = session.run(["logits"], feeds)[0]
    np.testing.assert_array_equal(runner.open(save(model, tmp_path)).run(["logits"], feeds)[0], expected)
