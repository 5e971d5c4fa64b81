"""Recurrences that others wrote: known by what they compute and replaced, or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from graphopt.ort.session import open_session
from tests.graphs import run_pass
from tests.passes.lift.canonicalize.recurrences.common import Graph, attention

Arrays = dict[str, np.ndarray]


def feeds_of(model: ir.Model, tokens: int = 9, batch: int = 2, seed: int = 0) -> Arrays:
    random, sizes = np.random.default_rng(seed), {"T": tokens, "B": batch}
    feeds = {}
    for port in model.graph.inputs:
        assert port.name is not None
        assert port.shape is not None
        shape = [dim if isinstance(dim, int) else sizes[str(dim)] for dim in port.shape]
        array = random.standard_normal(shape) / np.sqrt(shape[-1] if shape else 1)
        name = port.name.removeprefix("all_")
        array = -np.abs(array) if name == "g" else random.uniform(0, 1, shape) if name in ("b", "f") else array
        feeds[port.name] = array.astype(np.float32)
    return feeds


def outputs_of(model: ir.Model, feeds: Arrays, folder: Path) -> list[np.ndarray]:
    folder.mkdir(exist_ok=True)
    ir.save(model, folder / "model.onnx")
    return list(open_session(folder / "model.onnx").run(["ys", "final"], feeds))


def lifted(model: ir.Model, folder: Path, **sizes: int) -> ir.Node:
    """Lift a recurrence and compare; return the new node."""
    feeds = feeds_of(model, **sizes)
    before = outputs_of(model, feeds, folder / "before")
    report = run_pass(model, "canonicalize")
    assert not [skip for skip in report.skips if "recurrence" in skip.reason.code], report.skips
    assert {"Scan", "Loop"}.isdisjoint(node.op_type for node in model.graph)
    for one, other in zip(before, outputs_of(model, feeds, folder / "after"), strict=True):
        assert one.shape == other.shape
        # float32, in another order: sums of 9 tokens and up to 16 numbers of size 1
        np.testing.assert_allclose(other, one, atol=2e-6 * max(1, np.abs(one).max()))
    return next(node for node in model.graph if node.op_type == "LinearRecurrence")


def reason(model: ir.Model) -> str:
    """Return why a recurrence stays as it is."""
    report = run_pass(model, "canonicalize")
    assert {"Scan", "Loop"}.intersection(node.op_type for node in model.graph)
    (skip,) = (skip for skip in report.skips if skip.reason.code == "canonicalize.no-recurrence")
    return str(skip.reason)


@pytest.mark.parametrize("kind", ["scan", "loop"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_attention_of_each_rule(delta: bool, gated: bool, kind: str, tmp_path: Path) -> None:
    graph = attention(delta=delta, gated=gated)
    model = graph.scan() if kind == "scan" else graph.loop("k")
    node = lifted(model, tmp_path)
    assert node.attributes.get_int("delta") == delta
    assert "Transpose" not in {node.op_type for node in model.graph}, "rows are more heads: tokens stay first"
    assert node.attributes.get_float("scale") == 1.0  # queries are scaled in the step


def test_keys_that_heads_share_are_not_repeated(tmp_path: Path) -> None:
    model = attention(delta=True, gated=True, key_heads=1).scan()
    node = lifted(model, tmp_path)
    for value in node.inputs[:2]:
        expanded = value.producer().inputs[0].producer()  # type: ignore[union-attr]
        heads = expanded.inputs[1].producer().inputs[2]  # type: ignore[union-attr]
        assert heads.const_value.numpy().tolist() == [1]  # type: ignore[union-attr]


def test_tokens_along_another_axis_and_a_state_that_lies_the_other_way(tmp_path: Path) -> None:
    graph = Graph(["B", 5, 8], {"q": ["B", "T", 8], "k": ["B", "T", 8], "v": ["B", "T", 5], "g": ["B", "T", 8]})
    graph.constant("last", np.array([-1]))
    graph.constant("one_before", np.array([-2]))
    graph.add("Exp", ["g"], "factor")
    graph.add("Unsqueeze", ["factor", "one_before"], "factor_of_channels")
    graph.add("Mul", ["S", "factor_of_channels"], "decayed")
    graph.add("Einsum", ["v", "k"], "outer", equation="bv,bk->bvk")
    graph.add("Add", ["decayed", "outer"], "next")
    graph.add("Unsqueeze", ["q", "last"], "q_column")
    graph.add("MatMul", ["next", "q_column"], "y")
    node = lifted(graph.scan(scan_output_axes=[1]), tmp_path)
    assert node.inputs[3] is not None
    assert node.attributes.get_float("scale") == 1.0


def test_a_selective_scan(tmp_path: Path) -> None:
    channels, states = 6, 4
    tokens = {"x": ["T", "B", channels], "dt": ["T", "B", channels], "k": ["T", "B", states], "q": ["T", "B", states]}
    graph = Graph(["B", channels, states], tokens)
    graph.constant("A", -np.random.default_rng(0).uniform(0.5, 2, (channels, states)).astype(np.float32))
    graph.constant("last", np.array([-1]))
    graph.constant("one_before", np.array([-2]))
    graph.add("Softplus", ["dt"], "step_size")
    graph.add("Unsqueeze", ["step_size", "last"], "step_column")
    graph.add("Mul", ["step_column", "A"], "logarithm")
    graph.add("Exp", ["logarithm"], "factor")
    graph.add("Mul", ["S", "factor"], "decayed")
    graph.add("Mul", ["step_size", "x"], "scaled")
    graph.add("Unsqueeze", ["scaled", "last"], "value")
    graph.add("Unsqueeze", ["k", "one_before"], "key")
    graph.add("Mul", ["value", "key"], "outer")
    graph.add("Add", ["decayed", "outer"], "next")
    graph.add("Unsqueeze", ["q", "one_before"], "query")
    graph.add("Mul", ["next", "query"], "products")
    graph.add("ReduceSum", ["products", "last"], "y", keepdims=0)
    lifted(graph.scan(), tmp_path)


def test_a_gated_vector_whose_factor_comes_from_a_sigmoid_outside(tmp_path: Path) -> None:
    graph = Graph(["B", 6], {"f": ["T", "B", 6], "x": ["T", "B", 6]})
    graph.before = [helper.make_node("Sigmoid", ["all_z"], ["all_f"], name="gate")]
    graph.add("Mul", ["f", "S"], "kept")
    graph.constant("one", np.array(1, np.float32))
    graph.add("Sub", ["one", "f"], "rest")
    graph.add("Mul", ["rest", "x"], "added")
    graph.add("Add", ["kept", "added"], "next")
    graph.add("Identity", ["next"], "y")
    model = graph.scan()
    port = next(value for value in model.graph.inputs if value.name == "all_z")
    port.shape = ir.Shape(["T", "B", 6])
    lifted(model, tmp_path)


def test_an_unknown_number_as_factor_is_refused() -> None:
    graph = Graph(["B", 6], {"f": ["T", "B", 6], "x": ["T", "B", 6]})
    graph.add("Mul", ["f", "S"], "kept")
    graph.add("Add", ["kept", "x"], "next")
    graph.add("Identity", ["next"], "y")
    assert "no value that is the decay, and is positive" in reason(graph.scan())


@pytest.mark.parametrize("op_type", ["Tanh", "Softsign"])
def test_what_is_not_linear_is_refused(op_type: str) -> None:
    graph = Graph(["B", 6, 4], {"k": ["T", "B", 6, 1], "v": ["T", "B", 1, 4]})
    graph.add("Mul", ["k", "v"], "outer")
    graph.add("Add", ["S", "outer"], "sum")
    graph.add(op_type, ["sum"], "next")
    graph.constant("one_before", np.array([-2]))
    graph.add("ReduceSum", ["next", "one_before"], "y", keepdims=0)
    assert "no linear recurrence of the one before" in reason(graph.scan())


def test_an_output_of_the_state_before_the_token_is_refused() -> None:
    graph = Graph(["B", 6, 4], {"q": ["T", "B", 1, 6], "k": ["T", "B", 6, 1], "v": ["T", "B", 1, 4]})
    graph.add("Mul", ["k", "v"], "outer")
    graph.add("Add", ["S", "outer"], "next")
    graph.add("MatMul", ["q", "S"], "y")
    assert "its output is no product of the state with a query" in reason(graph.scan())


def test_backward_scans_and_several_states_are_refused() -> None:
    graph = attention(delta=False, gated=True)
    assert "backward" in reason(graph.scan(scan_input_directions=[1, 1, 1, 1]))
    two = attention(delta=False, gated=True)
    model = two.scan()
    node = next(node for node in model.graph if node.op_type == "Scan")
    node.attributes["num_scan_inputs"] = ir.AttrInt64("num_scan_inputs", 3)
    body = node.attributes["body"].as_graph()
    body.outputs.append(body.outputs[1])
    assert "states" in _reason_of(node)


def _reason_of(node: ir.Node) -> str:
    from graphopt.passes.lift.canonicalize.recurrences.steps import steps_of

    return str(steps_of(node))


def test_a_loop_that_may_stop_early_is_refused() -> None:
    model = attention(delta=False, gated=True).loop("k")
    model.graph.initializers["true"].const_value = ir.tensor(np.array(False), name="true")
    assert "it may end before the last token" in reason(model)


def test_a_loop_over_fewer_tokens_is_refused() -> None:
    model = attention(delta=False, gated=True).loop("k")
    model.graph.initializers["axis_of_tokens"].const_value = ir.tensor(np.array(1), name="axis_of_tokens")
    assert "that it goes through all tokens of all_" in reason(model)
