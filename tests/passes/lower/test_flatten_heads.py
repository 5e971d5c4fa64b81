from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.artifact import artifact
from graphopt.graph.diagnostics import PassReport
from graphopt.ort.session import session_of
from graphopt.passes.context import Ledger
from graphopt.passes.lift.canonicalize.flat_heads import take_heads_apart
from graphopt.passes.lower.flatten_heads import FLAT_ALREADY, NOT_TRANSPOSED, READ_BY_HEADS
from graphopt.tasks.causal_lm.interface import Interface
from tests.graphs import relative, run_pass

# onnxruntime transposes inside its kernel, and multiplies the same numbers in the same order: seen 0. Another version
# may cut a product of rows in other places, which is a rounding of float32.
FLOAT32 = 1e-6

MOVED = ("Attention", "Transpose", "Reshape", "RotaryEmbedding")


def run(model: ir.Model) -> list[np.ndarray]:
    """Return logits and caches of a prompt with padding, and of two tokens behind it."""
    random, interface = np.random.default_rng(0), Interface.of_graph(model.graph)
    feeds, made, tokens = interface.empty_past(2), [], 0
    with session_of(model) as session:
        for length in (5, 2):
            tokens += length
            mask = np.ones((2, tokens), np.int64)
            mask[0, :2] = 0
            positions = np.maximum(mask.cumsum(1) - 1, 0)[:, -length:]
            ids = random.integers(0, 32, (2, length))
            inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
            names = {each.name for each in session.get_inputs()}
            outputs = session.run(None, {**feeds, **{name: each for name, each in inputs.items() if name in names}})
            feeds = dict(zip(interface.past, outputs[1:], strict=True))
            made += [outputs[0][1], *outputs[1:]]  # the first row begins with padding, whose logits mean nothing
    return made


def kinds(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def attention(model: ir.Model) -> ir.Node:
    return next(node for node in model.graph if node.op_type == "Attention")


def producer(value: ir.Value | None) -> ir.Node:
    assert value is not None
    node = value.producer()
    assert node is not None
    return node


def test_transposes_and_reshapes_of_heads_go_and_numbers_stay(llama_canonical: ir.Model) -> None:
    model = llama_canonical
    before, layers = run(model), kinds(model)["Attention"]
    report = run_pass(model, "flatten_heads")
    assert not report.skips
    assert not kinds(model)["Transpose"]
    assert not kinds(model)["Reshape"]
    assert kinds(model)["RotaryEmbedding"] == 2 * layers
    assert all(len(node.inputs[0].shape) == 3 for node in model.graph if node.op_type == "Attention")
    assert max(relative(a, b) for a, b in zip(before, run(model), strict=True)) < FLOAT32


def test_canonicalize_takes_the_heads_apart_again(llama_canonical: ir.Model) -> None:
    model = llama_canonical
    before, moved = (
        run(model),
        [kinds(model)[each] for each in MOVED],
    )
    run_pass(model, "flatten_heads")
    report = run_pass(model, "canonicalize")
    assert not report.skips
    assert [kinds(model)[each] for each in MOVED] == moved
    assert not any(node.attributes.get_int("q_num_heads", 0) for node in model.graph if node.op_type == "Attention")
    assert max(relative(a, b) for a, b in zip(before, run(model), strict=True)) < FLOAT32
    assert run_pass(model, "quantize_kv").changes, "a pass that knows heads apart only finds them"


def test_an_encoder_without_rotary_embeddings(bert_artifact: Path) -> None:
    model = artifact.read(bert_artifact).model
    run_pass(model, "canonicalize")
    ids = np.random.default_rng(0).integers(0, 32, (2, 7))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    names = [value.name for value in model.graph.inputs]

    def outputs() -> list[np.ndarray]:
        with session_of(model) as session:
            return list(session.run(None, {name: feeds[name] for name in names}))

    before = outputs()
    report = run_pass(model, "flatten_heads")
    assert report.changes
    assert not report.skips
    assert not kinds(model)["Transpose"]
    assert max(relative(a, b) for a, b in zip(before, outputs(), strict=True)) < FLOAT32


def test_a_norm_of_heads_keeps_a_reshape(llama_canonical: ir.Model) -> None:
    model = llama_canonical
    for node in [node for node in model.graph if node.op_type == "Attention"]:
        transpose = producer(producer(node.inputs[1]).inputs[0])
        heads = transpose.inputs[0]
        assert heads is not None
        assert heads.shape is not None
        size = int(str(heads.shape[3]))
        gain = ir.val(f"{node.name}.gain", const_value=ir.tensor(np.linspace(0.5, 2, size, dtype=np.float32)))
        model.graph.initializers[str(gain.name)] = gain
        norm = ir.node("RMSNormalization", [heads, gain], {"axis": -1}, name=f"{node.name}.norm")
        norm.outputs[0].name, norm.outputs[0].type, norm.outputs[0].shape = f"{norm.name}.out", heads.type, heads.shape
        model.graph.insert_before(transpose, norm)
        transpose.replace_input_with(0, norm.outputs[0])
    before, layers = run(model), kinds(model)["Attention"]
    report = run_pass(model, "flatten_heads")
    assert not report.skips
    assert not kinds(model)["Transpose"]
    assert kinds(model)["Reshape"] == 2 * layers, "one in front of the norm, one behind"
    assert max(relative(a, b) for a, b in zip(before, run(model), strict=True)) < FLOAT32


def test_what_is_not_transposed_heads_is_left_and_named(llama_canonical: ir.Model) -> None:
    model = llama_canonical
    node = attention(model)
    query = node.inputs[0]
    assert query is not None
    doubled = ir.node("Add", [query, query], name="doubled")
    doubled.outputs[0].name, doubled.outputs[0].type, doubled.outputs[0].shape = "doubled.out", query.type, query.shape
    model.graph.insert_before(node, doubled)
    node.replace_input_with(0, doubled.outputs[0])
    before = run(model)
    report = run_pass(model, "flatten_heads")
    assert [(skip.where, skip.reason) for skip in report.skips] == [(node.name, NOT_TRANSPOSED(tensor="doubled.out"))]
    assert max(relative(a, b) for a, b in zip(before, run(model), strict=True)) < FLOAT32


def test_a_result_that_is_read_by_heads_is_left_and_named(llama_canonical: ir.Model) -> None:
    model = llama_canonical
    node = attention(model)
    made = node.outputs[0]
    model.graph.outputs.append(made)
    report = run_pass(model, "flatten_heads")
    assert [(skip.where, skip.reason) for skip in report.skips] == [(node.name, READ_BY_HEADS(tensor=made.name))]


def test_a_second_time_changes_nothing(llama_canonical: ir.Model) -> None:
    run_pass(llama_canonical, "flatten_heads")
    report = run_pass(llama_canonical, "flatten_heads")
    assert not report.changes
    assert {str(skip.reason) for skip in report.skips} == {str(FLAT_ALREADY())}


@pytest.mark.parametrize("width", [None, 7])
def test_rows_of_unknown_width_stay_flat_and_are_named(llama_canonical: ir.Model, width: int | None) -> None:
    model = llama_canonical
    run_pass(model, "flatten_heads")
    node = attention(model)
    value = node.inputs[2]
    assert value is not None
    value.shape = ir.Shape(["batch", "length", width])
    ledger = Ledger(PassReport(name="canonicalize", effect="exact"))
    take_heads_apart(model, ledger)
    assert [skip.where for skip in ledger.report.skips] == [node.name]
    assert str(value.name) in str(ledger.report.skips[0].reason)
