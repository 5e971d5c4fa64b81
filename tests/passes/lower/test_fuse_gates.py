from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.passes.lower.fuse_gates import NO_GATE, NOT_HALVES, READ_ELSEWHERE
from tests.graphs import Builder, graph_of, run_pass, session

HALF = 6


def gated(
    *, first: int = 0, sizes: tuple[int, int] = (HALF, HALF), reads_gate: bool = False, squares: bool = False
) -> ir.Model:
    """Return a split and its gated activation; half ``first`` is the gate."""
    build = Builder(np.random.default_rng(0), [], [])
    x = ir.val("x", ir.DataType.FLOAT, ["batch", "length", 2 * HALF])
    split = ir.node("Split", [x, build.constant("sizes", np.array(sizes))], {"axis": -1}, num_outputs=2, name="split")
    for index, (output, size) in enumerate(zip(split.outputs, sizes, strict=True)):
        output.name, output.dtype, output.shape = f"half{index}", x.dtype, ir.Shape(["batch", "length", size])
    build.nodes.append(split)
    gate, up = split.outputs[first], split.outputs[1 - first]
    silu = build.op("Mul", [build.op("Sigmoid", [gate], HALF, "sigmoid"), gate], HALF, "silu")
    y = build.op("Mul", [silu, silu if squares else up], HALF, "y")
    return graph_of(build, [x], [y, build.op("Neg", [gate], HALF, "n")] if reads_gate else [y])


def run(model: ir.Model, folder: Path) -> np.ndarray:
    x = 3 * np.random.default_rng(1).standard_normal((2, 3, 2 * HALF))
    output: np.ndarray = session(model, folder).run(None, {"x": x.astype(np.float32)})[0]
    return output


@pytest.mark.parametrize("float16", [False, True])
def test_four_nodes_become_one_and_numbers_stay(float16: bool, tmp_path: Path) -> None:
    model = gated()
    before = run(model, tmp_path / "before")
    report = run_pass(model, "fuse_gates")
    assert [node.op_type for node in model.graph] == ["SwiGLU"]
    assert [str(change.what) for change in report.changes] == ["splits x, and multiplies by the gate"]
    if float16:
        run_pass(model, "float16")
        assert next(node for node in model.graph if node.op_type == "SwiGLU").outputs[0].dtype == ir.DataType.FLOAT16
    # a sigmoid and two products in float32, or a gate, an up and a result of 11 bits, of numbers up to 50
    np.testing.assert_allclose(
        run(model, tmp_path / "after"), before, rtol=4 * 2.0**-11 if float16 else 1e-6, atol=1e-4
    )


@pytest.mark.parametrize(
    ("model", "code"),
    [
        (gated(first=1), NOT_HALVES.code),
        (gated(sizes=(HALF - 1, HALF + 1)), NOT_HALVES.code),
        (gated(reads_gate=True), READ_ELSEWHERE.code),
        (gated(squares=True), NO_GATE.code),
    ],
)
def test_other_products_of_a_sigmoid_stay(model: ir.Model, code: str) -> None:
    kinds = [node.op_type for node in model.graph]
    report = run_pass(model, "fuse_gates")
    assert [node.op_type for node in model.graph] == kinds
    assert [skip.reason.code for skip in report.skips] == [code]
