from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from graphopt.graph.diagnostics import PassReport
from graphopt.ort.session import open_session
from graphopt.passes.context import Ledger
from graphopt.passes.lift.canonicalize.cleanup import read_invariants_outside
from tests.graphs import relative
from tests.passes.lift.canonicalize.common import FLOAT32, canonicalize


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("biased", [True, False])
def test_gemm_becomes_matmul_and_add(tmp_path: Path, transposed: int, biased: bool) -> None:
    random = np.random.default_rng(0)
    x = ir.val("x", ir.DataType.FLOAT, ["rows", 6])
    weight = random.standard_normal((5, 6) if transposed else (6, 5)).astype(np.float32)
    values = [ir.val("w", const_value=ir.tensor(weight, name="w"))]
    if biased:
        values.append(ir.val("b", const_value=ir.tensor(random.standard_normal(5).astype(np.float32), name="b")))
    node = ir.node("Gemm", [x, *values], {"transB": transposed}, name="gemm")
    node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = "y", ir.DataType.FLOAT, ir.Shape(["rows", 5])
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=values, opset_imports={"": 23}, name="gemm")
    model = ir.Model(graph, ir_version=10)
    feeds = {"x": random.standard_normal((3, 6)).astype(np.float32)}
    results = []
    for name in ("before", "after"):
        ir.save(model, tmp_path / f"{name}.onnx")
        results.append(open_session(tmp_path / f"{name}.onnx").run(["y"], feeds)[0])
        canonicalize(model)
    assert {node.op_type for node in model.graph} == ({"MatMul", "Add"} if biased else {"MatMul"})
    assert relative(*results) < FLOAT32


@pytest.mark.parametrize(("attribute", "value", "reason"), [("alpha", 2.0, "alpha"), ("transA", 1, "transposes")])
def test_a_gemm_that_does_more_is_left_alone(attribute: str, value: float, reason: str) -> None:
    x = ir.val("x", ir.DataType.FLOAT, [6, 6])
    weight = ir.val("w", const_value=ir.tensor(np.eye(6, dtype=np.float32), name="w"))
    node = ir.node("Gemm", [x, weight], {attribute: value}, name="gemm")
    node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = "y", ir.DataType.FLOAT, ir.Shape([6, 6])
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[weight], opset_imports={"": 23}, name="gemm")
    report = canonicalize(ir.Model(graph, ir_version=10))
    assert [(skip.where, reason in str(skip.reason)) for skip in report.skips] == [("gemm", True)]


@pytest.mark.parametrize("steps", [0, 3])
def test_what_no_step_of_a_loop_changes_is_read_from_outside(tmp_path: Path, steps: int) -> None:
    model = ir.from_proto(
        onnx.parser.parse_model(
            """<ir_version: 10, opset_import: ["": 23]>
            g (int64 steps, float[2, 4] x, float[4, 4] w) => (float[2, 4] y, float[4, 4] z) {
                go = Constant<value = bool {1}>()
                y, last = Loop(steps, go, x, w) <body = step (int64 i, bool on, float[2, 4] s, float[4, 4] v)
                    => (bool on_again, float[2, 4] next, float[4, 4] same) {
                        on_again = Identity(on)
                        next = MatMul(s, v)
                        same = Identity(v)
                    }>
                z = Neg(last)
            }"""
        )
    )
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal((n, 4)).astype(np.float32) for name, n in (("x", 2), ("w", 4))}
    feeds["steps"] = np.array(steps)
    results = []
    for name in ("before", "after"):
        ir.save(model, tmp_path / f"{name}.onnx")
        results.append(open_session(tmp_path / f"{name}.onnx").run(None, feeds))
        report = canonicalize(model)
    (loop,) = (node for node in model.graph if node.op_type == "Loop")
    assert (len(loop.inputs), len(loop.outputs), len(loop.attributes["body"].as_graph().inputs)) == (3, 1, 3)
    assert not [change for change in report.changes if change.what.code == "canonicalize.invariants"]  # the second time
    for before, after in zip(*results, strict=True):
        np.testing.assert_array_equal(before, after)


def test_a_state_that_is_an_output_of_the_body_twice_stays() -> None:
    model = ir.from_proto(
        onnx.parser.parse_model(
            """<ir_version: 10, opset_import: ["": 23]>
            g (int64 steps, float[4] w) => (float[4] y, float[n, 4] z) {
                go = Constant<value = bool {1}>()
                last, z = Loop(steps, go, w) <body = step (int64 i, bool on, float[4] v)
                    => (bool on, float[4] v, float[4] v) { }>
                y = Neg(last)
            }"""
        )
    )
    read_invariants_outside(model, Ledger(PassReport(name="canonicalize", effect="exact")))
    (loop,) = (node for node in model.graph if node.op_type == "Loop")
    assert (len(loop.inputs), len(loop.outputs)) == (3, 2)
