from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphopt.analysis.structure.contrib import state_caches
from graphopt.analysis.structure.paged_caches import layers_of
from graphopt.ort.session import session_of
from graphopt.tasks.causal_lm.interface import Interface
from tests.contrib_graphs import FLOAT32, MultiHead, multi_head_model, run, tokens
from tests.graphs import relative, run_pass

LAYERS = st.builds(
    MultiHead,
    heads=st.sampled_from([1, 2, 3]),
    size=st.sampled_from([8, 16]),
    biased=st.booleans(),
    padding=st.sampled_from([0, 2, 3]),
    added=st.sampled_from(["", "mask", "bias"]),
    unidirectional=st.booleans(),
    scale=st.sampled_from([0.0, 0.1]),
)


def padded(*lengths: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Tokens of two rows, the first of which begins with two of padding."""
    calls, masks = tokens(2, *lengths)
    for mask in masks:
        mask[0, :2] = 0
    return calls, masks


@settings(max_examples=12)
@given(layer=LAYERS)
@example(layer=MultiHead())
@example(layer=MultiHead(biased=True, padding=3, added="bias"))
@example(layer=MultiHead(padding=0, added="mask", unidirectional=False))
def test_the_standard_ops_say_what_the_operator_computes(layer: MultiHead) -> None:
    model = multi_head_model(layer)
    state_caches(model)
    assert Interface.of_graph(model.graph).takes_padding
    calls, masks = padded(5, 4, 1)
    before = run(model, calls, masks)
    report = run_pass(model, "canonicalize")
    kinds = Counter(node.op_type for node in model.graph)
    assert kinds["Attention"] == 1
    assert {node.domain for node in model.graph} == {""}
    assert all("its mask" in str(skip.reason) for skip in report.skips)
    after = run(model, calls, masks)
    # a query that is padding itself may see no key, and then its result is unused
    before[0], after[0] = (logits[masks[0].astype(bool)] for logits in (before[0], after[0]))
    assert max(relative(a, b) for a, b in zip(before, after, strict=True)) < FLOAT32


@pytest.mark.parametrize(
    "layer", [MultiHead(), MultiHead(padding=3, unidirectional=False), MultiHead(padding=0, added="mask")]
)
def test_its_caches_go_into_pages(layer: MultiHead) -> None:
    model = multi_head_model(layer)
    state_caches(model)
    calls, masks = padded(5, 4, 1)
    before = run(model, calls, masks)[: len(calls)]
    run_pass(model, "canonicalize")
    report = run_pass(model, "page_kv", page=16)
    assert not report.skips
    assert [layer.attributes.kv_heads for layer in layers_of(model.graph)] == [2]
    with session_of(model) as session:
        interface = Interface.of_session(session)
        past = interface.empty_past(2, 10)
        for ids, mask, expected in zip(calls, masks, before, strict=True):
            logits, *present = session.run(["logits", *interface.present], interface.feeds(ids, mask, past))
            past = dict(zip(interface.past, present, strict=True))
            real = mask[:, -ids.shape[1] :].astype(bool)
            assert relative(expected[real], logits[real]) < FLOAT32


def test_without_a_cache_what_it_returns_are_keys_and_values() -> None:
    # only there may values have a size of their own
    model = multi_head_model(MultiHead(cached=False, biased=True, value_size=8))
    feeds = {"input_ids": np.arange(10).reshape(2, 5), "attention_mask": np.ones((2, 5), np.int64)}
    names = ["logits", "present.0.key", "present.0.value"]
    with session_of(model) as session:
        before = session.run(names, feeds)
    run_pass(model, "canonicalize")
    assert [node.op_type for node in model.graph if node.domain] == []
    with session_of(model) as session:
        after = session.run(names, feeds)
    assert [present.shape for present in before[1:]] == [(2, 2, 5, 16), (2, 2, 5, 8)]
    assert max(relative(a, b) for a, b in zip(before, after, strict=True)) < FLOAT32


def extra(model: ir.Model, name: str, dtype: ir.DataType, dims: list[int | str]) -> ir.Value:
    value = ir.val(name, dtype, dims)
    model.graph.inputs.append(value)
    return value


def node_of(model: ir.Model) -> ir.Node:
    return next(node for node in model.graph if node.op_type == "MultiHeadAttention")


def lengths_for_a_mask(model: ir.Model) -> None:
    node_of(model).replace_input_with(4, extra(model, "lengths", ir.DataType.INT32, ["batch_size"]))


def keys_of_another_sequence(model: ir.Model) -> None:
    for index, name in ((1, "keys"), (2, "values")):
        node_of(model).replace_input_with(index, extra(model, name, ir.DataType.FLOAT, ["batch_size", 2, "other", 16]))


def no_keys(model: ir.Model) -> None:
    for index in (1, 2):
        node_of(model).replace_input_with(index, None)


def one_cache(model: ir.Model) -> None:
    node_of(model).replace_input_with(7, None)


def a_computed_bias(model: ir.Model) -> None:
    node_of(model).replace_input_with(3, extra(model, "bias", ir.DataType.FLOAT, [96]))


def a_shared_buffer(model: ir.Model) -> None:
    node = node_of(model)
    node.resize_inputs(9)
    node.replace_input_with(8, extra(model, "past_length", ir.DataType.INT32, [1]))


def scores_that_are_read(model: ir.Model) -> None:
    node = node_of(model)
    node.resize_outputs(4)
    node.outputs[3].name, node.outputs[3].dtype = "scores", ir.DataType.FLOAT
    model.graph.outputs.append(node.outputs[3])


def three_heads(model: ir.Model) -> None:
    node_of(model).attributes["num_heads"] = ir.AttrInt64("num_heads", 3)


def a_mask_that_shows(model: ir.Model) -> None:
    node_of(model).attributes["mask_filter_value"] = ir.AttrFloat32("mask_filter_value", -1.0)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lengths_for_a_mask, "its padding lengths is no mask [batch, keys] or [batch, queries, keys]"),
        (keys_of_another_sequence, "those of another sequence, or packed"),
        (no_keys, "its queries, keys and values are not three tensors"),
        (one_cache, "only one of keys and values has a cache"),
        (a_computed_bias, "its bias is computed"),
        (a_shared_buffer, "its cache is a buffer that is input and output at once"),
        (scores_that_are_read, "its scores are read elsewhere"),
        (three_heads, "does not state the number and size of its heads"),
        (a_mask_that_shows, "does not hide what is padding"),
    ],
)
def test_what_attention_cannot_say_stays(spoil: Callable[[ir.Model], None], reason: str) -> None:
    model = multi_head_model(MultiHead())
    state_caches(model)
    spoil(model)
    report = run_pass(model, "canonicalize")
    assert any(reason in str(skip.reason) for skip in report.skips if skip.where == "attention")
    assert node_of(model)
