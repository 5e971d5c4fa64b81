from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphopt.analysis.structure.contrib import state_caches
from graphopt.analysis.structure.paged_caches import kv_nodes
from graphopt.errors import InputError
from graphopt.graph.weights import new_weight
from graphopt.ort.session import session_of
from graphopt.runtime_ops import port
from graphopt.tasks.causal_lm.interface import Interface
from tests.contrib_graphs import FLOAT32, POSITIONS, Layer, group_query_model, run, tables, tokens
from tests.graphs import relative, run_pass

LAYERS = st.builds(
    Layer,
    heads=st.sampled_from([2, 4]),
    groups=st.sampled_from([1, 2]),
    size=st.sampled_from([16, 32]),
    window=st.sampled_from([0, 1, 3, 50]),
    softcap=st.sampled_from([0.0, 2.0]),
    scale=st.sampled_from([0.0, 0.1]),
    packed=st.booleans(),
    turned=st.sampled_from([None, 16]),
    interleaved=st.booleans(),
)


@settings(max_examples=12)
@given(layer=LAYERS)
@example(layer=Layer())
@example(layer=Layer(window=3, softcap=2.0, packed=False))
@example(layer=Layer(size=32, turned=16, interleaved=True))
def test_the_standard_ops_say_what_the_operator_computes(layer: Layer) -> None:
    model = group_query_model(layer)
    state_caches(model)
    # Several tokens onto a cache: the operator takes them in one row only.
    several, one = tokens(1, 5, 4, 1), tokens(2, 6, 1, 1)
    before = [run(model, *several), run(model, *one)]
    report = run_pass(model, "canonicalize")
    assert not report.skips
    kinds = Counter(node.op_type for node in model.graph)
    assert kinds["Attention"] == 1
    assert kinds["RotaryEmbedding"] == (2 if layer.turned else 0)
    assert kinds["RMSNormalization"] == 2
    assert {node.domain for node in model.graph} == {""}
    for old, new in zip(before, [run(model, *several), run(model, *one)], strict=True):
        assert max(relative(a, b) for a, b in zip(old, new, strict=True)) < FLOAT32


def test_norms_of_queries_and_keys_come_before_they_are_turned() -> None:
    # onnxruntime has no kernel for these inputs on a CPU, so there is nothing to compare with but the definition.
    model = group_query_model(Layer(normed=True), qk_norm_epsilon=0.5)
    run_pass(model, "canonicalize")
    nodes = [node for node in model.graph if node.op_type == "RotaryEmbedding"]
    norms = [node.inputs[0].producer().inputs[0].producer() for node in nodes]
    assert [norm.op_type for norm in norms] == ["RMSNormalization"] * 2
    assert [norm.inputs[1].name for norm in norms] == ["q_norm", "k_norm"]
    assert [norm.attributes.get_float("epsilon") for norm in norms] == [0.5, 0.5]
    assert [list(norm.outputs[0].shape) for norm in norms] == [
        ["batch_size", "sequence_length", heads, 16] for heads in (4, 2)
    ]


@pytest.mark.parametrize("sinks", [None, np.array([0.0, -1.0, 3.0, 30.0], np.float32)])
@pytest.mark.parametrize("window", [0, 3])
def test_a_term_of_the_softmax_without_a_value_is_a_factor(window: int, sinks: np.ndarray | None) -> None:
    model = group_query_model(Layer(window=window), **({"smooth_softmax": 1} if sinks is None else {}))
    state_caches(model)
    node = next(node for node in model.graph if node.op_type == "GroupQueryAttention")
    if sinks is not None:
        node.resize_inputs(12)
        node.replace_input_with(11, new_weight(model.graph, "sinks", ir.tensor(sinks)))
    several, one = tokens(1, 5, 4, 1), tokens(2, 6, 1, 1)
    before = [run(model, *several), run(model, *one)]
    report = run_pass(model, "canonicalize")
    assert not report.skips
    assert {node.domain for node in model.graph} == {""}
    for old, new in zip(before, [run(model, *several), run(model, *one)], strict=True):
        assert max(relative(a, b) for a, b in zip(old, new, strict=True)) < FLOAT32
    paged = run_pass(model, "page_kv", page=16)
    assert not paged.skips
    (attention,) = kv_nodes(model.graph)
    logits = port(attention, "sink_logits")
    assert logits is not None
    assert logits.const_value is not None
    assert logits.const_value.numpy().tolist() == (np.zeros(4) if sinks is None else sinks).tolist()


def test_padding_behind_tokens_is_what_it_was_and_padding_in_front_is_obeyed() -> None:
    model = group_query_model(Layer(window=4))
    state_caches(model)
    (ids,), (mask,) = tokens(2, 8)
    mask[0, 5:] = 0
    before = run(model, [ids], [mask])[0]
    assert not Interface.of_graph(model.graph).takes_padding
    run_pass(model, "canonicalize")
    assert Interface.of_graph(model.graph).takes_padding
    real = mask.astype(bool)
    assert relative(before[real], run(model, [ids], [mask])[0][real]) < FLOAT32
    left, shifted = mask[:, ::-1], ids.copy()
    shifted[0] = np.roll(ids[0], 3)
    more = tokens(2, 2, seed=2)[0][0]
    masks = [left, np.concatenate((left, np.ones((2, 2), np.int64)), axis=1)]
    padded = run(model, [shifted, more], masks)
    alone = run(model, [ids[:1, :5], more[:1]], [mask[:1, :5], np.ones((1, 7), np.int64)])
    assert relative(alone[0], padded[0][:1, 3:]) < FLOAT32
    assert relative(alone[1], padded[1][:1]) < FLOAT32


def test_a_session_refuses_padding_where_the_operator_counts_from_the_first_column() -> None:
    model = group_query_model(Layer())
    state_caches(model)
    with session_of(model) as session:
        interface = Interface.of_session(session)
    mask = np.array([[0, 1], [1, 1]])
    with pytest.raises(InputError, match="counts a row's tokens from its first column"):
        interface.feeds(np.ones((2, 2), np.int64), mask, interface.empty_past(2))


def test_caches_state_heads_and_size() -> None:
    model = group_query_model(Layer(window=3))
    with pytest.raises(InputError, match="must state its KV heads and head size"):
        Interface.of_graph(model.graph).empty_past(1)
    state_caches(model)
    assert [cache.shape for cache in Interface.of_graph(model.graph).empty_past(1).values()] == [(1, 2, 0, 16)] * 2


@pytest.mark.parametrize(
    ("attributes", "index", "dims", "reason"),
    [
        ({"smooth_softmax": 1, "softcap": 2.0}, None, [], "an extra term in the denominator"),
        ({}, 10, [1, 1, "sequence_length", "total_sequence_length"], "it adds a bias to scores"),
        ({}, 12, [1], "its cache is quantized in its own way"),
        ({"local_window_size": 3, "sliding_window_cache": 1}, None, [], "the step grow_caches comes first"),
        ({"causal": 0}, None, [], "it is not causal"),
        ({"num_heads": 5}, None, [], "does not state the number and size of its heads"),
        ({}, 14, [16], "only one of queries and keys has a norm"),
    ],
)
def test_what_attention_cannot_say_stays(
    attributes: Mapping[str, object], index: int | None, dims: list[int | str], reason: str
) -> None:
    model = group_query_model(Layer(), **attributes)
    state_caches(model)
    node = next(node for node in model.graph if node.op_type == "GroupQueryAttention")
    if index is not None:
        extra = ir.val("extra", ir.DataType.FLOAT, dims)
        model.graph.initializers["extra"] = extra
        extra.const_value = ir.tensor(np.ones([n if isinstance(n, int) else 1 for n in dims], np.float32), name="extra")
        node.replace_input_with(index, extra)
    report = run_pass(model, "canonicalize")
    assert any(reason in str(skip.reason) for skip in report.skips if skip.where == "attention")
    assert any(node.op_type == "GroupQueryAttention" for node in model.graph)
    assert model.metadata_props["graphopt.padding"] == "none"


def test_lengths_that_mean_something_else_are_not_lifted() -> None:
    model = group_query_model(Layer())
    node = next(node for node in model.graph if node.op_type == "Sub")
    node.replace_input_with(1, model.graph.initializers["second"])
    again = next(node for node in model.graph if node.op_type == "Cast")
    tape = ir.tape.Tape()
    less = tape.op("Sub", [again.inputs[0], model.graph.initializers["one"]])
    tape.nodes[0].name = less.name = "one_less"
    model.graph.insert_before(again, tape.nodes)
    again.replace_input_with(0, less)
    report = run_pass(model, "canonicalize")
    assert any("is not the number of a row's tokens less 1" in str(skip.reason) for skip in report.skips)


@pytest.mark.parametrize(("theta", "positions"), [(10000.0, 64), (500000.0, 40000), (1.5, 3)])
def test_frequencies_are_read_off_a_table(theta: float, positions: int) -> None:
    model = group_query_model(Layer())
    for name, table in zip(("cos_cache", "sin_cache"), tables(8, positions, theta), strict=True):
        model.graph.initializers[name].const_value = ir.tensor(table, name=name)
        model.graph.initializers[name].shape = ir.Shape(table.shape)
    run_pass(model, "canonicalize")
    assert "cos_cache" not in model.graph.initializers
    found = model.graph.initializers["cos_cache.frequencies"].const_value.numpy()
    expected = (1.0 / theta ** (np.arange(8, dtype=np.float32) / np.float32(8))).astype(np.float32)
    # Where a table is short several float32 numbers give it; one unit in the last place at the longest.
    assert np.abs(found / expected - 1).max() < (1e-6 if positions < 10 else 2e-7)


def test_a_table_that_is_no_turning_is_looked_up() -> None:
    model = group_query_model(Layer())
    state_caches(model)
    # Angles that grow with the length, as YaRN's do with their factor on cosine and sine (Peng et al. 2023).
    for name in ("cos_cache", "sin_cache"):
        value = model.graph.initializers[name]
        value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1.1), name=name)
    calls = tokens(2, 6, 1)
    before = run(model, *calls)
    report = run_pass(model, "canonicalize")
    assert any("a table of angles that positions look up" in str(change.what) for change in report.changes)
    assert "cos_cache" in model.graph.initializers
    assert max(relative(a, b) for a, b in zip(before, run(model, *calls), strict=True)) < FLOAT32
    assert POSITIONS == 64
