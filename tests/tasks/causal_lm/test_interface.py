from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.artifact.artifact import MODEL
from graphopt.errors import InputError
from graphopt.ort.session import open_session
from graphopt.tasks.causal_lm.interface import Interface
from graphopt.tasks.ports import Port

INT64, FLOAT = np.dtype(np.int64), np.dtype(np.float32)


def ports(layers: int = 2, *, mask: bool = True, positions: bool = True) -> tuple[list[Port], list[Port]]:
    """The inputs and outputs of a model with 3 KV heads of 4 and 11 tokens."""
    inputs = [Port("input_ids", INT64, (None, None))]
    inputs += [Port("attention_mask", INT64, (None, None))] * mask
    inputs += [Port("position_ids", INT64, (None, None))] * positions
    outputs = [Port("logits", FLOAT, (None, None, 11))]
    for layer in range(layers):
        for part in ("key", "value"):
            inputs.append(Port(f"past_key_values.{layer}.{part}", FLOAT, (None, 3, None, 4)))
            outputs.append(Port(f"present.{layer}.{part}", FLOAT, (None, 3, None, 4)))
    return inputs, outputs


def test_roles() -> None:
    interface = Interface.of_ports(*ports())
    assert interface.past == tuple(f"past_key_values.{i}.{part}" for i in range(2) for part in ("key", "value"))
    assert interface.present == tuple(f"present.{i}.{part}" for i in range(2) for part in ("key", "value"))
    assert interface.vocabulary == 11


def test_present_follows_the_order_of_past() -> None:
    inputs, outputs = ports()
    interface = Interface.of_ports(inputs, outputs[::-1])
    assert [name.replace("present", "past_key_values") for name in interface.present] == list(interface.past)


@pytest.mark.parametrize("name", ["input_ids", "logits", "present.1.value"])
def test_missing_name(name: str) -> None:
    inputs, outputs = ([port for port in side if port.name != name] for side in ports())
    side = "input" if name == "input_ids" else "output"
    with pytest.raises(InputError, match=f"the graph has no {side} of this name") as caught:
        Interface.of_ports(inputs, outputs)
    assert caught.value.tensor == name


@pytest.mark.parametrize("name", ["use_cache_branch", "past_key_values.0.decoder.key", "pixel_values"])
def test_input_that_nobody_knows_how_to_feed(name: str) -> None:
    inputs, outputs = ports()
    with pytest.raises(InputError, match="does not know how to feed") as caught:
        Interface.of_ports([*inputs, Port(name, FLOAT, ())], outputs)
    assert caught.value.tensor == name


def test_graph_and_session_agree(llama_artifact: Path) -> None:
    of_graph = Interface.of_graph(ir.load(llama_artifact / MODEL).graph)
    assert of_graph == Interface.of_session(open_session(llama_artifact / MODEL))
    assert of_graph.inputs["past_key_values.0.key"] == Port("past_key_values.0.key", FLOAT, (None, 2, None, 16))


def test_a_number_that_is_spelled_as_a_symbol_is_fixed() -> None:
    shape = ir.Shape(["batch", "8", None, 4])
    ids, cache = ir.val("input_ids", ir.DataType.INT64), ir.val("past_key_values.0.key", ir.DataType.FLOAT, shape)
    outputs = [ir.val("logits"), ir.val("present.0.key")]
    interface = Interface.of_graph(ir.Graph([ids, cache], outputs, nodes=[]))
    assert interface.inputs["past_key_values.0.key"].shape == (None, 8, None, 4)
    assert interface.vocabulary is None


def test_empty_past() -> None:
    past = Interface.of_ports(*ports()).empty_past(5)
    assert {array.shape for array in past.values()} == {(5, 3, 0, 4)}
    assert {array.dtype for array in past.values()} == {FLOAT}


@pytest.mark.parametrize("shape", [(None, None, None, 4), (None, 3, None, None), (None, 3, 4)])
def test_cache_of_unknown_size(shape: tuple[int | None, ...]) -> None:
    inputs, outputs = ports()
    inputs[-1] = Port(inputs[-1].name, FLOAT, shape)
    with pytest.raises(InputError, match="must state its KV heads and head size") as caught:
        Interface.of_ports(inputs, outputs).empty_past(1)
    assert caught.value.tensor == "past_key_values.1.value"


@given(
    paddings=st.lists(st.integers(0, 11), min_size=1, max_size=4),
    pieces=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_positions_count_real_tokens_however_they_are_fed(paddings: list[int], pieces: list[int]) -> None:
    interface = Interface.of_ports(*ports())
    length = sum(pieces)
    mask = (np.arange(length) >= np.array(paddings)[:, None]).astype(np.int64)
    ids = np.arange(mask.size).reshape(mask.shape)
    past = interface.empty_past(len(paddings))
    all_positions, start = [], 0
    for piece in pieces:
        end = start + piece
        feeds = interface.feeds(ids[:, start:end], mask[:, :end], past)
        assert set(feeds) == set(interface.inputs)
        assert all(array.flags.c_contiguous for array in feeds.values())
        assert np.array_equal(feeds["input_ids"], ids[:, start:end])
        assert feeds["attention_mask"].shape == (len(paddings), end)
        all_positions.append(feeds["position_ids"])
        start = end
    for positions, padding in zip(np.concatenate(all_positions, axis=1), paddings, strict=True):
        # 0, 1, 2, ... from the first real token; padding in front of it sits at 0, a position that exists.
        assert positions.tolist() == [0] * min(padding, length) + list(range(length - min(padding, length)))


def test_graph_without_mask_refuses_padding() -> None:
    interface = Interface.of_ports(*ports(mask=False, positions=False))
    ids, past = np.zeros((2, 3), np.int64), interface.empty_past(2)
    assert set(interface.feeds(ids, np.ones((2, 3), np.int64), past)) == {"input_ids", *interface.past}
    padded_mask = np.array([[1, 1, 1], [0, 1, 1]])
    with pytest.raises(InputError, match="no attention_mask input"):
        interface.feeds(ids, padded_mask, past)
    assert "attention_mask" not in interface.feeds(ids, padded_mask, past, needs_mask=False)
