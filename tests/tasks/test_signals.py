"""Kinds of models that read images or recordings: told apart by their ports, fed at random, compared row by row."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from graphopt.tasks import task_of_ports
from graphopt.tasks.image_classifier import IMAGE_CLASSIFIER
from graphopt.tasks.ports import Port
from graphopt.tasks.signals import IMAGES, SignalProbe, random_signals, rows_of

IMAGE, SOUND = (None, 3, 8, 8), (None, None)


def ports(**shapes: tuple[int | None, ...]) -> dict[str, Port]:
    return {name: Port(name, np.dtype(np.float32), shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("inputs", "outputs", "task"),
    [
        (ports(pixel_values=IMAGE), ports(logits=(None, 5)), "image_classifier"),
        (ports(pixel_values=IMAGE), ports(logits=(None, 5, 2, 2)), "image_segmenter"),
        (ports(pixel_values=IMAGE), ports(logits=(None, 6, 5), pred_boxes=(None, 6, 4)), "object_detector"),
        (ports(pixel_values=IMAGE, pixel_mask=(None, 8, 8)), ports(logits=(None, 6, 5), pred_boxes=(None, 6, 4)),
         "object_detector"),
        (ports(pixel_values=IMAGE), ports(last_hidden_state=(None, 5, 8), pooler_output=(None, 8)), "image_encoder"),
        (ports(pixel_values=IMAGE), ports(image_embeds=(None, 8)), "image_encoder"),
        (ports(input_values=SOUND), ports(logits=(None, None, 12)), "speech_ctc"),
        (ports(input_values=SOUND), ports(logits=(None, 5)), "audio_classifier"),
        (ports(input_features=(None, 8, 64)), ports(last_hidden_state=(None, 32, 8)), "audio_encoder"),
        (ports(input_values=SOUND), ports(last_hidden_state=(None, None, 8)), "audio_encoder"),
        (ports(pixel_values=(None, 4, 3, 8, 8)), ports(logits=(None, 5)), "graph"),
        ({"pixel_values": Port("pixel_values", np.dtype(np.uint8), IMAGE)}, ports(logits=(None, 5)), "graph"),
    ],
)  # fmt: skip
def test_kinds_are_told_apart_by_ports(inputs: dict[str, Port], outputs: dict[str, Port], task: str) -> None:
    assert task_of_ports(inputs, outputs).name == task


def test_random_signals_have_mean_0_and_deviation_1_and_neighbours_that_are_alike() -> None:
    images = random_signals((2, 3, 32, 48), np.random.default_rng(0))
    flat = images.reshape(2, -1)
    np.testing.assert_allclose(flat.mean(-1), 0, atol=1e-5)
    np.testing.assert_allclose(flat.std(-1), 1, atol=1e-5)
    # Of white noise the mean of this would be 0.
    assert (images[..., 1:] * images[..., :-1]).mean() > 0.5
    assert random_signals((1, 400), np.random.default_rng(0)).shape == (1, 400)


def test_rows_are_places_that_all_outputs_have() -> None:
    logits, boxes = np.zeros((2, 6, 5)), np.ones((2, 6, 4))
    assert rows_of([logits, boxes]).shape == (12, 9)
    assert rows_of([np.zeros((2, 5, 3, 4))]).shape == (24, 5)
    assert rows_of([np.zeros((2, 7, 8)), np.zeros((2, 8))]).shape == (2, 64)


def test_masks_hide_nothing() -> None:
    inputs = list(ports(pixel_values=(None, 3, None, None), pixel_mask=(None, None, None)).values())
    feeds = IMAGE_CLASSIFIER.random_feeds(inputs, 2, np.random.default_rng(0))
    assert feeds["pixel_mask"].shape == (2, *feeds["pixel_values"].shape[2:])
    assert feeds["pixel_mask"].all()


def with_two_outputs(factor: float) -> onnxruntime.InferenceSession:
    """Logits, and features that are a hundredth as large, times ``factor``."""
    weight = np.random.default_rng(0).standard_normal((192, 5)).astype(np.float32)
    nodes = [
        helper.make_node("Flatten", ["pixel_values"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["logits"]),
        helper.make_node("Mul", ["logits", "factor"], ["features"]),
    ]
    float32 = onnx.TensorProto.FLOAT
    ports_in = [helper.make_tensor_value_info("pixel_values", float32, ["batch", 3, 8, 8])]
    ports_out = [helper.make_tensor_value_info(name, float32, ["batch", 5]) for name in ("logits", "features")]
    weights = [
        numpy_helper.from_array(weight, "weight"),
        numpy_helper.from_array(np.array(0.01 * factor, np.float32), "factor"),
    ]
    graph = helper.make_graph(nodes, "two", ports_in, ports_out, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_outputs_that_the_kind_does_not_name_are_compared_in_units_of_their_own() -> None:
    sessions = with_two_outputs(1), with_two_outputs(1.01)
    images = random_signals((2, 3, 8, 8), np.random.default_rng(0))
    probe = SignalProbe({"pixel_values": images}, ["logits"], 5, IMAGES, ["features"])
    before, after = (probe.run(session) for session in sessions)
    figures = probe.figures(before, after)
    # features of 1% more: against the largest logit as they are, 1e-4
    np.testing.assert_allclose(np.abs(after - before).max() / np.abs(before).max(), 0.01, rtol=1e-3)
    np.testing.assert_allclose([figures["cosine of features"], figures["same_class_share"]], 1, rtol=1e-6)
    assert before.shape == (2, 10)
    assert SignalProbe({"pixel_values": images}, ["logits"], 5, IMAGES).run(sessions[0]).shape == (2, 5)
