from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.passes.lower.fuse_residuals import NO_SUM, OTHER_AXES, STATISTICS_READ
from tests.graphs import Builder, graph_of, run_pass, session

WIDTH = 8
NORMS = {"RMSNormalization": "SkipSimplifiedLayerNormalization", "LayerNormalization": "SkipLayerNormalization"}


def residual(norm: str = "RMSNormalization", *, reads_sum: bool = True, **attributes: object) -> ir.Model:
    """Return a sum, its norm, and what reads both, or the norm alone."""
    build = Builder(np.random.default_rng(0), [], [])
    x, y = (ir.val(name, ir.DataType.FLOAT, ["batch", "length", WIDTH]) for name in ("x", "y"))
    total = build.op("Add", [x, y], WIDTH, "total")
    constants = [build.weight("gain", WIDTH)]
    constants += [build.weight("beta", WIDTH)] if norm == "LayerNormalization" else []
    chosen = {"axis": -1, "epsilon": 1e-3, **attributes}
    normed = build.op(norm, [total, *constants], WIDTH, "normed", **chosen)
    z = build.op("Add", [normed, total], WIDTH, "z") if reads_sum else build.op("Neg", [normed], WIDTH, "z")
    return graph_of(build, [x, y], [z])


def run(model: ir.Model, folder: Path) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    # a small row, whose epsilon counts, among others
    feeds = {name: random.standard_normal((2, 3, WIDTH)).astype(np.float32) for name in ("x", "y")}
    for rows in feeds.values():
        rows[0, 0] *= 1e-2
    outputs: list[np.ndarray] = session(model, folder).run(None, feeds)
    return outputs


@pytest.mark.parametrize("reads_sum", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_adds_what_it_normalizes_and_numbers_stay(norm: str, reads_sum: bool, tmp_path: Path) -> None:
    model = residual(norm, reads_sum=reads_sum)
    before = run(model, tmp_path / "before")
    report = run_pass(model, "fuse_residuals")
    assert [node.op_type for node in model.graph] == [NORMS[norm], "Add" if reads_sum else "Neg"]
    assert [str(change.what) for change in report.changes] == ["adds what it normalizes, and gives the sum too"]
    assert not report.skips
    # sums of 8 squares in another order, a square root and a quotient, of numbers up to 4
    np.testing.assert_allclose(run(model, tmp_path / "after")[0], before[0], atol=4e-6)


def test_what_canonicalize_lifts_is_what_was_there(tmp_path: Path) -> None:
    model = residual()
    before = run(model, tmp_path / "before")
    run_pass(model, "fuse_residuals")
    run_pass(model, "canonicalize")
    assert sorted(node.op_type for node in model.graph) == ["Add", "Add", "RMSNormalization"]
    np.testing.assert_array_equal(run(model, tmp_path / "after")[0], before[0])


def test_in_float16_both_are_float16_and_so_is_what_is_read(tmp_path: Path) -> None:
    model = residual()
    before = run(model, tmp_path / "before")
    run_pass(model, "fuse_residuals")
    run_pass(model, "float16")
    norm = next(node for node in model.graph if node.domain == "com.microsoft")
    assert {value.dtype for value in (*norm.inputs, norm.outputs[0], norm.outputs[3])} == {ir.DataType.FLOAT16}
    # inputs, gain, sum, norm and its sum are rounded to 11 bits, of numbers up to 6
    np.testing.assert_allclose(run(model, tmp_path / "after")[0], before[0], atol=6 * 6 * 2.0**-11)


def broadcast(model: ir.Model) -> None:
    model.graph.inputs[1].shape = ir.Shape([1, 1, WIDTH])


def read_deviation(model: ir.Model) -> None:
    norm = next(node for node in model.graph if node.op_type == "LayerNormalization")
    norm.resize_outputs(3)
    norm.outputs[2].name, norm.outputs[2].type = "deviation", norm.outputs[0].type
    norm.outputs[2].shape = ir.Shape(["batch", "length", 1])
    model.graph.outputs.append(norm.outputs[2])


def feed_gain(model: ir.Model) -> None:
    model.graph.inputs.append(model.graph.initializers["gain"])


@pytest.mark.parametrize(
    ("model", "change", "code"),
    [
        (residual(), broadcast, NO_SUM.code),
        (residual(axis=1), None, OTHER_AXES.code),
        (residual(stash_type=16), None, OTHER_AXES.code),
        (residual(), feed_gain, OTHER_AXES.code),
        (residual("LayerNormalization"), read_deviation, STATISTICS_READ.code),
    ],
)
def test_what_the_fused_norm_does_not_compute_stays(
    model: ir.Model, change: Callable[[ir.Model], None] | None, code: str
) -> None:
    if change is not None:
        change(model)
    kinds = [node.op_type for node in model.graph]
    report = run_pass(model, "fuse_residuals")
    assert [node.op_type for node in model.graph] == kinds
    assert [skip.reason.code for skip in report.skips] == [code]


def test_of_two_norms_of_one_sum_the_second_reads_the_sum_that_the_first_gives(tmp_path: Path) -> None:
    build = Builder(np.random.default_rng(0), [], [])
    x, y = (ir.val(name, ir.DataType.FLOAT, ["batch", "length", WIDTH]) for name in ("x", "y"))
    total = build.op("Add", [x, y], WIDTH, "total")
    first, second = (
        build.op("RMSNormalization", [total, build.weight(f"gain{i}", WIDTH)], WIDTH, f"normed{i}") for i in range(2)
    )
    model = graph_of(build, [x, y], [first, second])
    before = run(model, tmp_path / "before")
    report = run_pass(model, "fuse_residuals")
    assert sorted(node.op_type for node in model.graph) == ["RMSNormalization", "SkipSimplifiedLayerNormalization"]
    assert [skip.reason.code for skip in report.skips] == [NO_SUM.code]
    for old, new in zip(before, run(model, tmp_path / "after"), strict=True):
        np.testing.assert_allclose(new, old, atol=4e-6)  # as above
