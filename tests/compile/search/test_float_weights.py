"""Weights of a graph that stay in floats: as few as meet what is required, the same when it is compiled, refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import typer
from onnx import numpy_helper

import graphopt
from graphopt.cli import search as command
from graphopt.compile.losses import losses
from graphopt.compile.search import search_float_weights
from graphopt.errors import InputError
from graphopt.quality.judge import quality_figures
from graphopt.quality.verdict import Requirement
from tests.tasks.graph import graphs

PRECISE, MORE_PRECISE = Requirement.parse("cosine>=0.9999"), Requirement.parse("cosine>=0.99999")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Convolutions whose second weight has a channel that a scale of its row suits badly: one large number in each."""
    path = graphs.convolutions(tmp_path_factory.mktemp("search") / "model.onnx")
    model = onnx.load(path)
    (second,) = (tensor for tensor in model.graph.initializer if tensor.name == "second")
    numbers = numpy_helper.to_array(second).copy()
    numbers[:, 0, 0, 0] *= 60
    second.CopyFrom(numpy_helper.from_array(numbers, "second"))
    onnx.save(model, path)
    images = np.random.default_rng(7).standard_normal((4, 1, 3, 16, 16)).astype(np.float32)
    np.savez(path.parent / "images.npz", images=images)
    return path


@pytest.fixture(scope="module")
def inputs(file: Path) -> Path:
    return file.parent / "images.npz"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


def test_the_weight_that_costs_most_stays_in_floats(file: Path, inputs: Path, work: Path, tmp_path: Path) -> None:
    result = search_float_weights(file, work, requirement=PRECISE, inputs=inputs)
    # Large numbers take the scale of their row: the others have few codes left.
    assert next(iter(result.costs)) == "second"
    assert "second" in result.best_trial.floats
    assert set(result.costs) == {"first", "second", "taps", "last", "head"}
    assert not result.unmet
    assert result.recipe_trial.figures["cosine_mean"] < 0.9999 <= result.best_trial.figures["cosine_mean"]
    assert result.recipe_trial.bytes < result.best_trial.bytes
    (tmp_path / "recipe.yaml").write_text(result.recipe.to_yaml(), encoding="utf-8")
    graphopt.optimize(file, tmp_path / "recipe.yaml", tmp_path / "compiled", inputs=inputs)
    figures = quality_figures(file, tmp_path / "compiled", "graph", inputs=inputs)
    # The same samples and the same codes: sums of floats may be taken in another order.
    assert figures["cosine_mean"] == pytest.approx(result.best_trial.figures["cosine_mean"], abs=1e-6)


def test_what_was_measured_is_not_measured_again(file: Path, inputs: Path, work: Path) -> None:
    search_float_weights(file, work, requirement=PRECISE, inputs=inputs)
    stages: list[str] = []
    search_float_weights(
        file, work, requirement=PRECISE, inputs=inputs, on_stage=lambda stage, *_: stages.append(stage)
    )
    assert not [stage for stage in stages if "in floats" in stage]


def test_bytes_are_kept_to_and_what_is_not_met_is_told(file: Path, inputs: Path, work: Path) -> None:
    easy_result = search_float_weights(file, work, requirement=Requirement.parse("cosine>0"), inputs=inputs)
    assert easy_result.best_trial == easy_result.recipe_trial
    room = easy_result.recipe_trial.bytes + 1000  # the second weight takes 6912 bytes more, the first 1296
    result = search_float_weights(file, work, requirement=MORE_PRECISE, inputs=inputs, size=room)
    assert easy_result.recipe_trial.bytes <= result.best_trial.bytes <= room
    assert "second" not in result.best_trial.floats
    assert result.unmet
    assert "cosine" in result.unmet[0]
    with pytest.raises(InputError, match="bytes as the recipe rounds them"):
        search_float_weights(file, work, requirement=MORE_PRECISE, inputs=inputs, size=100)


def test_the_command_writes_a_recipe_and_ends_with_one_where_it_is_not_met(
    file: Path, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.search(file, tmp_path / "met.yaml", require="cosine>0.9", inputs=inputs)
    assert "0 of 5 weights in floats" in capsys.readouterr().out
    assert (tmp_path / "met.yaml").is_file()
    with pytest.raises(typer.Exit):
        command.search(file, tmp_path / "unmet.yaml", require="cosine>0.99999", inputs=inputs, size="14KB")
    assert "not met: cosine is" in capsys.readouterr().out
    with pytest.raises(InputError, match="formats are chosen for models that make text"):
        command.search(file, tmp_path / "x.yaml", formats=["nl4:64"])
    with pytest.raises(InputError, match="--jobs and --cluster are for models that make text"):
        command.search(file, tmp_path / "x.yaml", jobs=2)


def test_models_that_make_text_and_recipes_without_rounding_are_refused(
    file: Path, inputs: Path, shipped_artifact: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="for models that make no text"):
        command.search(shipped_artifact, tmp_path / "x.yaml", inputs=inputs)
    with pytest.raises(InputError, match="rounds no weights"):
        search_float_weights(file, tmp_path, recipe="rotate", inputs=inputs)
    graphopt.optimize(file, "int8", tmp_path / "int8", inputs=inputs)
    with pytest.raises(InputError, match="graphopt search"):
        losses(file, tmp_path / "int8")
