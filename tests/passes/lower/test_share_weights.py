"""Equal weights are stored once: in the graph, in its branches, and only if every byte agrees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from tests.compile.doctor import planted_models
from tests.graphs import run_pass, session

X = np.random.default_rng(5).standard_normal((3, 128)).astype(np.float32)


def test_one_of_two_equal_weights_stays_and_not_a_bit_moves(tmp_path: Path) -> None:
    model = ir.load(planted_models.repeated_products(tmp_path / "model.onnx"))
    (before,) = session(model, tmp_path / "before").run(None, {"x": X})
    report = run_pass(model, "share_weights")
    assert report.effect == "exact"
    assert [c.what.figures for c in report.changes] == [{"weight": "first", "count": 1, "bytes": 4 * 128 * 256}]
    assert list(model.graph.initializers) == ["first"]
    np.testing.assert_array_equal(session(model, tmp_path / "after").run(None, {"x": X})[0], before)
    assert not run_pass(model, "share_weights").changes


def branches(path: Path, *, in_graph: bool) -> ir.Model:
    """``If`` with the same weight in each branch, and with ``in_graph`` in the graph too."""
    weight = planted_models.floats(128, 256)

    def branch(name: str, operator: str) -> onnx.GraphProto:
        nodes = [
            helper.make_node("MatMul", ["x", f"{name}.weight"], [f"{name}.h"], name=f"{name}.product"),
            helper.make_node(operator, [f"{name}.h"], [f"{name}.y"], name=f"{name}.out"),
        ]
        output = helper.make_tensor_value_info(f"{name}.y", TensorProto.FLOAT, ["batch", 256])
        return helper.make_graph(nodes, name, [], [output], [planted_models.constant(f"{name}.weight", weight)])

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], name="sum", keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["is_high"], name="is_high"),
        helper.make_node(
            "If", ["is_high"], ["z"], name="if", then_branch=branch("a", "Relu"), else_branch=branch("b", "Neg")
        ),
        helper.make_node("MatMul", ["x", "weight"], ["w"], name="product"),
        helper.make_node("Add", ["z", "w"], ["y"], name="add"),
    ]
    outer = weight if in_graph else weight + np.float32(1)
    weights = [planted_models.constant("zero", np.float32(0).reshape(())), planted_models.constant("weight", outer)]
    return ir.load(planted_models.save_graph(path, nodes, weights))


@pytest.mark.parametrize("in_graph", [True, False])
def test_branches_read_the_weight_of_the_graph_around_them(in_graph: bool, tmp_path: Path) -> None:
    model = branches(tmp_path / "model.onnx", in_graph=in_graph)
    # A name that is free in one branch may not be so in another, which the graph around both must not use.
    for node in model.graph.all_nodes():
        if node.name == "a.product":
            node.outputs[0].name = "b.weight"
    before = [session(model, tmp_path / "before").run(None, {"x": sign * X})[0] for sign in (1, -1)]
    report = run_pass(model, "share_weights")
    (change,) = report.changes
    assert (change.where, change.what.figures["count"]) == (("weight", 2) if in_graph else ("b.weight.shared", 1))
    assert [len(graph.initializers) for graph in model.graphs()] == [2 if in_graph else 3, 0, 0]
    after = [session(model, tmp_path / "after").run(None, {"x": sign * X})[0] for sign in (1, -1)]
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("difference", ["bit", "type", "shape", "size"])
def test_what_differs_in_anything_stays(difference: str, tmp_path: Path) -> None:
    first = planted_models.floats(128, 256)
    second = first.copy()
    if difference == "bit":
        second[0, 0] = np.nextafter(second[0, 0], 1)
    names = ["x", "second"]
    nodes = [helper.make_node("MatMul", ["x", "first"], ["a"], name="a")]
    if difference == "type":
        second = first.view(np.int32)
        nodes.append(helper.make_node("Cast", ["second"], ["cast"], name="cast", to=TensorProto.FLOAT))
        names = ["x", "cast"]
    if difference == "shape":
        second = first.reshape(256, 128)
        nodes.append(helper.make_node("Transpose", ["second"], ["turned"], name="turn"))
        names = ["x", "turned"]
    if difference == "size":  # constants of a few bytes, which each node may have its own of
        first, second = (np.ones((1, 60), np.float32) for _ in range(2))
        nodes, names = [helper.make_node("Add", ["x1", "first"], ["a"], name="a")], ["x1", "second"]
        nodes.insert(0, helper.make_node("ReduceMean", ["x"], ["x1"], name="mean"))
    nodes += [
        helper.make_node("Add" if difference == "size" else "MatMul", names, ["b"], name="b"),
        helper.make_node("Mul", ["a", "b"], ["y"], name="both"),
    ]
    weights = [planted_models.constant("first", first), planted_models.constant("second", second)]
    model = ir.load(planted_models.save_graph(tmp_path / "model.onnx", nodes, weights))
    assert not run_pass(model, "share_weights").changes
    assert {"first", "second"} <= set(model.graph.initializers)
