"""Constants that a graph computes: folded with the bits that onnxruntime computes, or left with a reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx import helper

from graphopt.graph import provenance
from tests.compile.doctor import planted_models
from tests.graphs import run_pass, session

X = np.random.default_rng(5).standard_normal((3, 128)).astype(np.float32)


def test_a_computed_weight_is_stored_with_the_same_bits(tmp_path: Path) -> None:
    model = ir.load(planted_models.computed_constants(tmp_path / "model.onnx"))
    (before,) = session(model, tmp_path / "before").run(None, {"x": X})
    report = run_pass(model, "fold_constants")
    assert report.effect == "exact"
    assert [(c.where, c.what.code, c.what.figures["nodes"]) for c in report.changes] == [
        ("weight.folded", "fold_constants.folded", 2)
    ]
    assert [node.name for node in model.graph] == ["product"]
    assert list(model.graph.initializers) == ["weight.folded"]
    assert provenance.history(model.graph.initializers["weight.folded"]) == (["fold_constants"], ["scale", "turn"])
    # onnxruntime folds the same nodes by the same kernels, so not a bit may move.
    np.testing.assert_array_equal(session(model, tmp_path / "after").run(None, {"x": X})[0], before)
    assert not run_pass(model, "fold_constants").changes


def test_a_result_that_is_larger_than_its_sources_stays(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Expand", ["row", "shape"], ["weight"], name="widen"),
        helper.make_node("MatMul", ["x", "weight"], ["y"], name="product"),
    ]
    row, shape = (
        planted_models.constant("row", planted_models.floats(1, 256)),
        planted_models.constant("shape", np.array([128, 256])),
    )
    model = ir.load(planted_models.save_graph(tmp_path / "model.onnx", nodes, [row, shape]))
    report = run_pass(model, "fold_constants")
    assert not report.changes
    assert [(s.where, s.reason.code) for s in report.skips] == [("weight", "fold_constants.too-large")]
    assert [node.name for node in model.graph] == ["widen", "product"]


def test_random_numbers_and_codes_are_no_constants(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["stored"], ["noise"], name="draw"),
        helper.make_node("DequantizeLinear", ["codes", "scale"], ["decoded"], name="decode"),
        helper.make_node("Add", ["decoded", "noise"], ["weight"], name="add"),
        helper.make_node("MatMul", ["x", "weight"], ["y"], name="product"),
    ]
    weights = [
        planted_models.constant("stored", planted_models.floats(128, 256)),
        planted_models.constant("codes", np.ones((128, 256), np.int8)),
        planted_models.constant("scale", np.float32(0.1).reshape(())),
    ]
    report = run_pass(ir.load(planted_models.save_graph(tmp_path / "model.onnx", nodes, weights)), "fold_constants")
    assert (report.changes, report.skips) == ([], [])


def test_what_onnxruntime_refuses_stays_with_what_it_said(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Reshape", ["stored", "shape"], ["folded"], name="reshape"),  # 128 x 256 are no 7 x 7
        helper.make_node("Sqrt", ["folded"], ["weight"], name="root"),
        helper.make_node("MatMul", ["x", "weight"], ["y"], name="product"),
    ]
    weights = [
        planted_models.constant("stored", planted_models.floats(128, 256)),
        planted_models.constant("shape", np.array([7, 7])),
    ]
    model = ir.load(planted_models.save_graph(tmp_path / "model.onnx", nodes, weights))
    report = run_pass(model, "fold_constants")
    (skip,) = report.skips
    assert (skip.where, skip.reason.code) == ("weight", "fold_constants.not-run")
    assert [node.name for node in model.graph] == ["reshape", "root", "product"]
