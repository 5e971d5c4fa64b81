"""Random inputs fit the graph that reads them: sizes by names and trials, integers by their readers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.errors import InputError
from graphopt.graph.onnx_file import load
from graphopt.ort.session import open_session
from graphopt.tasks import task_of
from graphopt.tasks.graph.draws import RandomInputs
from graphopt.tasks.graph.ranges import range_of
from graphopt.tasks.graph.samples import Samples
from tests.tasks.graph import graphs


def settled(file: Path) -> tuple[Samples, ir.Graph]:
    graph, samples = load(file).graph, Samples()
    assert task_of(graph).name == "graph"
    samples.settle(graph, open_session(file, threads=1))
    return samples, graph


def test_a_branch_is_chosen_by_a_constant_that_it_is_compared_with(tmp_path: Path) -> None:
    samples, graph = settled(graphs.sound(tmp_path / "sound.onnx"))
    feeds = samples.feeds(graph, 1)[0]
    assert feeds["rate"] == 16000
    # The state has a batch where it says nothing; the sound is longer than the taps of the convolution.
    assert feeds["state"].shape == (2, len(feeds["sound"]), 8)
    assert feeds["sound"].shape[1] >= 32


def test_integers_stay_in_the_table_that_they_index(tmp_path: Path) -> None:
    samples, graph = settled(graphs.table(tmp_path / "table.onnx"))
    assert range_of(graph.inputs[0]).limit == 7
    feeds = [sample["kinds"] for sample in samples.feeds(graph, 8)]
    assert (min(map(np.min, feeds)), max(map(np.max, feeds))) == (0, 6)
    first = samples.feeds(graph, 1)[0]
    assert first["kinds"].dtype == np.int32
    assert first["lengths"].tolist() == [first["kinds"].shape[1]] * 2
    assert first["mask"].shape[1] == 2 * first["kinds"].shape[1]
    assert first["mask"].all()


def test_weights_that_are_listed_as_inputs_are_not_fed(tmp_path: Path) -> None:
    samples, graph = settled(graphs.picture(tmp_path / "picture.onnx"))
    assert [value.name for value in graph.inputs] == ["pixels"]
    assert samples.feeds(graph, 1)[0]["pixels"].shape == (2, 3, 64, 64)
    assert str(samples.description(samples.feeds(graph, 2))) == "2 draws of random inputs, pixels [2, 3, 64, 64]"


def test_draws_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    graph = load(graphs.picture(tmp_path / "picture.onnx")).graph
    inputs = RandomInputs.of_graph(graph)
    sizes = next(iter(inputs.sizes()))
    assert np.array_equal(inputs.draw(sizes, 3)["pixels"], inputs.draw(sizes, 3)["pixels"])
    assert not np.array_equal(inputs.draw(sizes, 3)["pixels"], inputs.draw(sizes, 4)["pixels"])


def test_what_cannot_be_drawn_or_run_is_refused(tmp_path: Path) -> None:
    text = ir.Value(name="text", type=ir.TensorType(ir.DataType.STRING), shape=ir.Shape(["n"]))
    with pytest.raises(InputError, match=r"cannot be drawn for an input of the type.*tensor=text"):
        RandomInputs.of_graph(ir.Graph([text], [], nodes=[], name="g"))
    file = graphs.picture(tmp_path / "picture.onnx")
    graph = load(file).graph
    # The graph of the session takes any height; the taps are longer than this one.
    graph.inputs[0].shape = ir.Shape(["N", 3, 8, "W"])
    with pytest.raises(InputError, match=r"none of the random inputs that were tried; the first were pixels \[2, 3, 8"):
        Samples().settle(graph, open_session(file, threads=1))
