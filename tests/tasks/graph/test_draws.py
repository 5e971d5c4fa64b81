"""Random inputs fit the graph that reads them: sizes by names and trials, integers by their readers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from graphopt.errors import InputError
from graphopt.graph.onnx_file import load
from graphopt.ort.session import open_session
from graphopt.tasks import task_of
from graphopt.tasks.graph.draws import RandomInputs
from graphopt.tasks.graph.ranges import range_of
from graphopt.tasks.graph.samples import Samples
from tests.tasks.graph import graphs


def settle_samples(file: Path) -> tuple[Samples, ir.Graph]:
    graph, samples = load(file).graph, Samples()
    assert task_of(graph).name == "graph"
    samples.settle(graph, open_session(file, threads=1))
    return samples, graph


def test_a_branch_is_chosen_by_a_constant_that_it_is_compared_with(tmp_path: Path) -> None:
    samples, graph = settle_samples(graphs.sound(tmp_path / "sound.onnx"))
    feeds = samples.feeds(graph, 1)[0]
    assert feeds["rate"] == 16000
    # The state has a batch where it says nothing; the sound is longer than the taps of the convolution.
    assert feeds["state"].shape == (2, len(feeds["sound"]), 8)
    assert feeds["sound"].shape[1] >= 32


def test_integers_stay_in_the_table_that_they_index(tmp_path: Path) -> None:
    samples, graph = settle_samples(graphs.table(tmp_path / "table.onnx"))
    assert range_of(graph.inputs[0]).limit == 7
    feeds = [sample["kinds"] for sample in samples.feeds(graph, 8)]
    assert (min(map(np.min, feeds)), max(map(np.max, feeds))) == (0, 6)
    first = samples.feeds(graph, 1)[0]
    assert first["kinds"].dtype == np.int32
    assert first["lengths"].tolist() == [first["kinds"].shape[1]] * 2
    assert first["mask"].shape[1] == 2 * first["kinds"].shape[1]
    assert first["mask"].all()


def test_weights_that_are_listed_as_inputs_are_not_fed(tmp_path: Path) -> None:
    samples, graph = settle_samples(graphs.picture(tmp_path / "picture.onnx"))
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


def waves(path: Path, nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], rank: int = 2) -> Path:
    """Waves [B, N] and how long each is, and y of what ``nodes`` make of them."""
    inputs = [
        helper.make_tensor_value_info("waves", TensorProto.FLOAT, ["B", "N"]),
        helper.make_tensor_value_info("waves_lens", TensorProto.INT64, ["B"]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * rank)]
    return graphs.save_graph(path, helper.make_graph(nodes, "waves", inputs, outputs, weights))


def test_a_letter_is_a_batch_in_front_and_a_length_elsewhere(tmp_path: Path) -> None:
    # As long as 30 on both sides are padded by reflection: there must be more than those.
    nodes = [
        helper.make_node("Cast", ["waves_lens"], ["lens"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["lens", "one"], ["column"]),
        helper.make_node("Pad", ["waves", "pads"], ["wide"], mode="reflect"),
        helper.make_node("Mul", ["wide", "column"], ["y"]),
    ]
    weights = [graphs.constant("one", np.array([1])), graphs.constant("pads", np.array([0, 30, 0, 30]))]
    samples, graph = settle_samples(waves(tmp_path / "waves.onnx", nodes, weights))
    feeds = samples.feeds(graph, 1)[0]
    assert feeds["waves"].shape == (2, 32)
    assert feeds["waves_lens"].tolist() == [32, 32]


def test_sizes_whose_outputs_say_something_come_first(tmp_path: Path) -> None:
    """Of a wave that is no longer than 100 nothing is left but zeros, as of features that a mask hides."""
    nodes = [
        helper.make_node("Shape", ["waves"], ["size"], start=1, end=2),
        helper.make_node("Greater", ["size", "hundred"], ["is_long"]),
        helper.make_node("Cast", ["is_long"], ["factor"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["waves", "factor"], ["y"]),
    ]
    samples, graph = settle_samples(
        waves(tmp_path / "waves.onnx", nodes, [graphs.constant("hundred", np.array([100]))])
    )
    assert samples.feeds(graph, 1)[0]["waves"].shape == (2, 128)


def test_spectra_are_tried_with_long_signals_first(tmp_path: Path) -> None:
    """onnxruntime may end the process, by a signal, where one is shorter than a frame."""
    nodes = [
        helper.make_node("Unsqueeze", ["waves", "two"], ["wide"]),
        helper.make_node("DFT", ["wide"], ["y"], axis=1),
    ]
    file = waves(tmp_path / "waves.onnx", nodes, [graphs.constant("two", np.array([2]))], rank=3)
    lengths = [sizes["N"] for sizes in RandomInputs.of_graph(load(file).graph).sizes() if sizes["B"] != sizes["N"]]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 16000
