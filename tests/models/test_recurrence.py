"""Models with recurrent states: what transformers computes, whatever pieces the tokens come in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.artifact.artifact import MODEL
from graphopt.models.recurrence import simplify
from graphopt.ort.session import open_session
from graphopt.tasks.causal_lm.interface import Interface
from tests.families import RECURRENT, VOCABULARY
from tests.models.test_export import torch_logits

# Relative to the largest logit. Float32 summed in another order moves these logits by 3e-7 to 3e-6.
TOLERANCE = 1e-5
LENGTH = 20
# At once; a prompt and single steps; pieces; one by one from empty states.
WAYS = ([20], [16, 1, 1, 1, 1], [9, 11], [1] * 20)
# Nodes of our operators in the layers that are exported.
NODES = {
    "qwen3_next": {"CausalConv": 1, "LinearRecurrence": 1},
    "lfm2": {"CausalConv": 1},
    "mamba2": {"CausalConv": 1, "LinearRecurrence": 1},
    "granitemoehybrid": {"CausalConv": 1, "LinearRecurrence": 1},
    "falcon_h1": {"CausalConv": 1, "LinearRecurrence": 1},
    "mamba": {"CausalConv": 1, "LinearRecurrence": 1},
    "rwkv": {"CausalConv": 6, "LinearRecurrence": 2},
    "recurrent_gemma": {"CausalConv": 1, "LinearRecurrence": 1},
}
STATES = {
    "qwen3_next": ["0.conv_state", "0.recurrent_state", "1.key", "1.value"],
    "lfm2": ["0.conv_state", "1.key", "1.value"],
    "mamba2": ["0.conv_state", "0.recurrent_state"],
    "rwkv": [
        f"{layer}.{state}"
        for layer in range(2)
        for state in ("conv_state", "conv_state_1", "conv_state_2", "recurrent_state")
    ],
}


def run_pieces(folder: Path, ids: np.ndarray, mask: np.ndarray, pieces: Sequence[int]) -> np.ndarray:
    """Return the logits of all columns, fed in pieces."""
    session = open_session(folder / MODEL)
    interface = Interface.of_session(session)
    states, logits, begin = interface.empty_past(len(ids)), [], 0
    for length in pieces:
        end = begin + length
        feeds = interface.feeds(ids[:, begin:end], mask[:, :end], states)
        first, *present = session.run(["logits", *interface.present], feeds)
        states = dict(zip(interface.past, present, strict=True))
        logits.append(first)
        begin = end
    return np.concatenate(logits, axis=1)


def unpadded_logits(folder: Path, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return what torch computes for each row alone, without its padding, which RecurrentGemma's convolution reads."""
    logits = np.zeros((*ids.shape, VOCABULARY), np.float32)
    for row, is_real in enumerate(mask.astype(bool)):
        logits[row, is_real] = torch_logits(folder, ids[row : row + 1, is_real], mask[row : row + 1, is_real])[0]
    return logits


@pytest.mark.parametrize("family", RECURRENT)
def test_logits_are_those_of_transformers(
    family: str, make_folder: Callable[[str], Path], make_artifact: Callable[[str], Path]
) -> None:
    ids = np.random.default_rng(1).integers(0, VOCABULARY, (3, LENGTH))
    mask = (np.arange(LENGTH) >= np.array([0, 3, 9])[:, None]).astype(np.int64)
    expected, real = unpadded_logits(make_folder(family), ids, mask), mask.astype(bool)
    largest = np.abs(expected[real]).max()
    assert 0.2 < largest < 100
    for pieces in WAYS:
        logits = run_pieces(make_artifact(family), ids, mask, pieces)
        assert np.abs(logits - expected)[real].max() <= TOLERANCE * largest, pieces


@pytest.mark.parametrize("family", RECURRENT)
def test_padding_touches_no_state(family: str, make_artifact: Callable[[str], Path]) -> None:
    ids = np.random.default_rng(2).integers(0, VOCABULARY, (1, LENGTH))
    mask = np.ones((1, LENGTH), np.int64)
    mask[0, [0, 7, 8, 15, 19]] = 0
    folder, real = make_artifact(family), mask.astype(bool)
    with_padding = run_pieces(folder, ids, mask, [12, 8])[real]
    plain = run_pieces(folder, ids[real][None], mask[real][None], [int(mask.sum())])[0]
    assert np.abs(with_padding - plain).max() <= TOLERANCE * np.abs(plain).max()


@pytest.mark.parametrize("family", RECURRENT)
def test_a_recurrence_is_one_node(family: str, make_artifact: Callable[[str], Path]) -> None:
    model = ir.load(make_artifact(family) / MODEL)
    assert Counter(node.op_type for node in model.graph if node.domain) == NODES[family]
    assert not {"Loop", "Scan", "Conv", "CumSum", "Einsum"} & {node.op_type for node in model.graph}
    assert {key[:2] for key in model.functions} == {("ai.graphopt", name) for name in NODES[family]}
    past = Interface.of_graph(model.graph).past
    assert list(past) == [f"past_key_values.{name}" for name in STATES.get(family, [])] or family not in STATES


def test_what_has_no_past_begins_with_zeros(make_artifact: Callable[[str], Path]) -> None:
    interface = Interface.of_graph(ir.load(make_artifact("qwen3_next") / MODEL).graph)
    states = interface.empty_past(2)
    assert interface.recurrent == ("past_key_values.0.conv_state", "past_key_values.0.recurrent_state")
    shapes = {name.partition(".")[2]: array.shape for name, array in states.items()}
    assert shapes["0.conv_state"] == (2, 128, 3)  # channels of queries, keys and values; one tap less than four
    assert shapes["0.recurrent_state"] == (2, 4, 16, 16)
    assert shapes["1.key"] == (2, 2, 0, 16)
    assert not any(array.any() for array in states.values())


def test_only_transposes_that_come_back_are_dropped() -> None:
    x = ir.val("x", ir.DataType.FLOAT, [2, 3, 4])
    first = ir.node("Transpose", [x], {"perm": [0, 2, 1]})
    back, outer = (ir.node("Transpose", [first.outputs[0]], {"perm": perm}) for perm in ([0, 2, 1], [2, 0, 1]))
    ends = [ir.node("Neg", [node.outputs[0]]) for node in (back, outer)]
    graph = ir.Graph([x], [node.outputs[0] for node in ends], nodes=[first, back, outer, *ends])
    simplify(graph)
    assert ends[0].inputs[0] is x
    assert list(graph) == [first, outer, *ends]
