"""Which kind of model a graph is, and what an encoder is fed."""

from __future__ import annotations

import numpy as np
import pytest

from graphopt.analysis.structure.ports import (
    ATTENTION_MASK,
    CachePort,
    exported_name,
    is_cross_port,
    past_port,
    present_port,
)
from graphopt.errors import InputError
from graphopt.tasks import TASKS, task_of, task_of_ports
from graphopt.tasks.encoder import EncoderInterface, cosines, vocabulary_of
from graphopt.tasks.ports import Port
from tests.graphs import VOCABULARY, residual_model

INT64, FLOAT = np.dtype(np.int64), np.dtype(np.float32)


@pytest.mark.parametrize(
    ("inputs", "outputs", "name"),
    [
        (["input_ids"], ["logits"], "causal_lm"),
        (["input_ids", "past_key_values.0.key"], ["logits", "present.0.key"], "causal_lm"),
        (["input_ids", "attention_mask"], ["last_hidden_state", "pooler_output"], "encoder"),
        (["input_ids", "attention_mask"], ["class_logits"], "classifier"),
        (["input_ids"], ["token_logits"], "token_classifier"),
        (["input_ids"], ["start_logits", "end_logits"], "question_answering"),
        # The body of a language model without its head: it has caches, so it is no encoder.
        (["input_ids", "past_key_values.0.key"], ["last_hidden_state", "present.0.key"], "causal_lm"),
        (["input_ids", "cross_key_values.0.key"], ["logits", "present.0.key"], "seq2seq"),
        (["input_features"], ["cross_key_values.0.key", "cross_key_values.0.value"], "seq2seq_encoder"),
        (["inputs_embeds", "past_key_values.0.key"], ["logits", "present.0.key"], "vision_language"),
        (["input_ids", "image_features"], ["inputs_embeds"], "token_embedding"),
        (["pixel_values", "image_grid_thw"], ["image_features"], "vision_tower"),
        (["pixels"], ["boxes"], "graph"),
        (["input_ids", "pixels"], ["logits_per_image"], "graph"),
    ],
)
def test_a_task_is_found_by_the_names_of_ports(inputs: list[str], outputs: list[str], name: str) -> None:
    assert task_of_ports(inputs, outputs).name == name


def test_a_graph_of_no_known_kind_is_one_of_any_kind() -> None:
    graph = residual_model().graph
    graph.outputs[0].name = "boxes"
    task = task_of(graph)
    assert task.name == "graph"
    task.check(graph)


def encoder(*names: str) -> EncoderInterface:
    ports = [Port(name, INT64, (None, None)) for name in names]
    return EncoderInterface.of_ports(ports, [Port("last_hidden_state", FLOAT, (None, None, 8))])


def test_an_encoder_is_fed_what_it_takes() -> None:
    ids, mask = np.array([[5, 6, 7], [8, 9, 0]]), np.array([[1, 1, 1], [1, 1, 0]])
    interface = encoder("input_ids", "attention_mask", "token_type_ids", "position_ids")
    feeds = interface.feeds(ids, mask)
    assert {name: array.tolist() for name, array in feeds.items()} == {
        "input_ids": ids.tolist(),
        "attention_mask": mask.tolist(),
        "token_type_ids": [[0, 0, 0]] * 2,
        "position_ids": [[0, 1, 2]] * 2,
    }
    assert interface.width == 8
    assert list(encoder("input_ids").feeds(ids, np.ones_like(ids))) == ["input_ids"]
    with pytest.raises(InputError, match=f"no {ATTENTION_MASK} input, so texts of different length cannot share"):
        encoder("input_ids").feeds(ids, mask)
    with pytest.raises(InputError, match=r"does not know how to feed.*known inputs of an encoder"):
        encoder("input_ids", "pixels")


def test_calls_of_an_encoder_have_no_past() -> None:
    graph = residual_model().graph
    graph.outputs[0].name = "last_hidden_state"
    task = task_of(graph)
    assert task.name == "encoder"
    calls = list(task.calls(graph, [(1, 2, 3), (2, 4, 1)]))
    assert [(call.length, call.past, call.real.shape) for call in calls] == [(5, 0, (1, 5)), (5, 0, (2, 5))]
    assert all(call.real.all() for call in calls)  # there is no mask
    assert vocabulary_of(graph) == VOCABULARY
    probe = task.probe(graph, context=100)
    assert probe.real.shape == (2, 12)


def test_cosines_are_row_by_row_and_0_for_zeros() -> None:
    a = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [2.0, 0.0]])
    b = np.array([[0.0, 3.0], [2.0, 2.0], [1.0, 0.0], [-1.0, 0.0]])
    np.testing.assert_allclose(cosines(a, b), [0, 1, 0, -1], atol=1e-15)


def test_names_of_caches_are_read_back_as_they_are_written() -> None:
    for part in ("key", "value", "keys", "summaries"):
        port = CachePort(12, part)
        assert past_port(port.past) == present_port(port.present) == port
        assert past_port(port.present) is present_port(port.past) is None
    assert past_port("past_key_values.0.keyed") is past_port(None) is None
    assert exported_name("input.past_key_values.layers.3.keys") == "past_key_values.3.key"
    assert exported_name("output.past_key_values.layers.3.values") == "present.3.value"
    assert exported_name("attention_mask") is None
    cross = "past_key_values.cross_attention_cache.layers.3.keys"
    assert exported_name(f"input.{cross}") == exported_name(f"output.{cross}") == "cross_key_values.3.key"
    self_attention_name = "output.past_key_values.self_attention_cache.layers.3.values"
    assert (
        exported_name(self_attention_name),
        is_cross_port("cross_key_values.3.key"),
        is_cross_port(self_attention_name),
    ) == (
        "present.3.value",
        True,
        False,
    )
    assert set(TASKS) == {
        "audio_classifier",
        "audio_encoder",
        "denoiser",
        "image_classifier",
        "image_encoder",
        "image_segmenter",
        "object_detector",
        "speech_ctc",
        "causal_lm",
        "classifier",
        "encoder",
        "graph",
        "logits_classifier",
        "logits_token_classifier",
        "mtp_head",
        "question_answering",
        "seq2seq",
        "seq2seq_encoder",
        "token_classifier",
        "token_embedding",
        "vision_language",
        "vision_tower",
    }
