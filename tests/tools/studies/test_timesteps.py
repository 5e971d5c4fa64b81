"""Graphs of tools/studies/timesteps.py on one convolution: constants by timestep, mean errors, ranges of a call."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tools.studies.timesteps import OUTPUT, Feeds, correct_output, dynamic, session_of, stack_constants

STEP = 0.01


def convolution(bias: float) -> tuple[onnx.ModelProto, np.ndarray]:
    """Return a graph of one convolution, and the codes of its weight."""
    codes = np.random.default_rng(0).integers(-63, 64, (8, 4, 3, 3), np.int8)
    weights = [
        numpy_helper.from_array(codes * np.float32(STEP), "w"),
        numpy_helper.from_array(np.full(8, bias, "f"), "b"),
    ]
    ports = [
        helper.make_tensor_value_info("sample", 1, [1, 4, 8, 8]),
        helper.make_tensor_value_info("timestep", 1, [1]),
    ]
    output = helper.make_tensor_value_info(OUTPUT, 1, [1, 8, 8, 8])
    nodes = [
        helper.make_node("Conv", ["sample", "w", "b"], ["h"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["h", "timestep"], [OUTPUT]),
    ]
    graph = helper.make_graph(nodes, "convolution", ports, [output], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10), codes


def call(seed: int, timestep: float) -> Feeds:
    sample = np.random.default_rng(seed).standard_normal((1, 4, 8, 8)).astype(np.float32)
    return {"sample": sample, "timestep": np.array([timestep], np.float32)}


def run(model: onnx.ModelProto, feeds: Feeds) -> np.ndarray:
    return np.asarray(session_of(model).run(None, feeds)[0])


def test_constants_are_those_of_the_group_of_the_timestep() -> None:
    models = [convolution(float(bias))[0] for bias in range(4)]
    stacked_model = stack_constants(models)
    for timestep, group in ((0, 0), (249, 0), (250, 1), (500, 2), (999, 3)):
        feeds = call(group, timestep)
        # Float32 sums of numbers up to 1000, and a bias that is no constant is added apart; groups differ by 1.
        np.testing.assert_allclose(run(stacked_model, feeds), run(models[group], feeds), rtol=1e-6, atol=1e-3)
    assert [tensor.name for tensor in stacked_model.graph.initializer].count("w") == 1
    models[1].graph.node[1].op_type = "Sub"
    with pytest.raises(ValueError, match="graphs of unlike nodes"):
        stack_constants(models)


def test_the_mean_error_of_a_group_is_taken_off() -> None:
    model, _ = convolution(1.0)
    calls = [call(seed, timestep) for seed, timestep in enumerate((100, 400, 600, 900))]
    answers = [run(model, feeds) - (feeds["timestep"] > 500) for feeds in calls]
    for feeds, answer in zip(calls, answers, strict=True):
        # A line through points that lie on one, in float32: numbers of up to 900.
        np.testing.assert_allclose(run(correct_output(model, calls, answers, 2), feeds), answer, atol=1e-2)


def test_ranges_of_a_call_cost_its_rounding() -> None:
    model, codes = convolution(1.0)
    scales = numpy_helper.from_array(np.full(8, STEP, np.float32), "scales")
    names = ["x", "x_scale", "x_zero", "codes", "scales"]
    product = helper.make_node("QLinearConv", names, ["y"], name="conv")
    weights = helper.make_model(
        helper.make_graph([product], "codes", [], [], [numpy_helper.from_array(codes, "codes"), scales])
    )
    result, feeds = dynamic(model, weights), call(0, 1)
    assert [node.op_type for node in result.graph.node][:2] == ["DynamicQuantizeLinear", "ConvInteger"]
    expected = run(model, feeds)
    # 255 steps over 6 deviations: a deviation of 1 / 150 of an input, and as much of a sum.
    assert np.linalg.norm(run(result, feeds) - expected) < 0.02 * np.linalg.norm(expected)
