"""float64 becomes float32, within the rounding of float32, or stays with a reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from tests.compile.doctor import planted_models
from tests.graphs import run_pass, session

X = np.random.default_rng(5).standard_normal((3, 128)).astype(np.float32)
WIDEN = helper.make_node("Cast", ["x"], ["wide"], name="widen", to=planted_models.DOUBLE)
NARROW = helper.make_node("Cast", ["product"], ["y"], name="narrow", to=planted_models.FLOAT)

SUM = 128 * 2.0**-24 * 40
"""Rounding of sums of 128 products in float32: 128 half-steps of at most the sum of absolute products, below 40."""


def types(model: ir.Model) -> set[ir.DataType | None]:
    return {value.dtype for graph in model.graphs() for value in graph.initializers.values()}


def test_weights_casts_and_attributes_become_float32(tmp_path: Path) -> None:
    one = helper.make_tensor("one", TensorProto.DOUBLE, [1], [1.0])
    nodes = [
        WIDEN,
        helper.make_node("ConstantOfShape", ["shape"], ["ones"], name="ones", value=one),
        helper.make_node("EyeLike", ["weight"], ["eye"], name="eye", dtype=planted_models.DOUBLE),
        helper.make_node("Add", ["weight", "eye"], ["sum"], name="sum"),
        helper.make_node("MatMul", ["wide", "sum"], ["xw"], name="product"),
        helper.make_node("Add", ["xw", "ones"], ["product"], name="shift"),
        NARROW,
    ]
    weights = [
        planted_models.constant("weight", planted_models.floats(128, 256).astype(np.float64)),
        planted_models.constant("shape", np.array([256])),
    ]
    model = ir.load(planted_models.save_graph(tmp_path / "model.onnx", nodes, weights))
    (before,) = session(model, tmp_path / "before").run(None, {"x": X})
    report = run_pass(model, "single_precision")
    assert [(c.what.code, c.what.figures) for c in report.changes] == [
        ("single_precision.narrowed", {"weights": 1, "casts": 1})
    ]
    assert ir.DataType.DOUBLE not in types(model)
    (after,) = session(model, tmp_path / "after").run(None, {"x": X})
    assert np.abs(after - before).max() <= SUM


def test_a_circle_of_casts_follows_the_types(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["there"], name="there", to=planted_models.DOUBLE),
        helper.make_node("Cast", ["there"], ["back"], name="back", to=planted_models.FLOAT),
        helper.make_node("Cast", ["back"], ["wide"], name="widen", to=planted_models.DOUBLE),
        helper.make_node("MatMul", ["wide", "weight"], ["product"], name="product"),
        NARROW,
    ]
    weights = [planted_models.constant("weight", planted_models.floats(128, 256).astype(np.float64))]
    model = ir.load(planted_models.save_graph(tmp_path / "model.onnx", nodes, weights))
    (before,) = session(model, tmp_path / "before").run(None, {"x": X})
    run_pass(model, "single_precision")
    (after,) = session(model, tmp_path / "after").run(None, {"x": X})
    assert np.abs(after - before).max() <= SUM


def test_a_graph_without_float64_has_nothing_to_do(tmp_path: Path) -> None:
    report = run_pass(ir.load(planted_models.repeated_products(tmp_path / "model.onnx")), "single_precision")
    assert (report.changes, report.skips) == ([], [])


@pytest.mark.parametrize(
    ("code", "location"),
    [("port", "y"), ("out-of-range", "weight"), ("integers", "tip")],
)
def test_what_must_stay_in_float64_is_named(code: str, location: str, tmp_path: Path) -> None:
    weight = planted_models.floats(128, 256).astype(np.float64)
    nodes = [WIDEN, helper.make_node("MatMul", ["wide", "weight"], ["product"], name="product")]
    if code == "integers":
        nodes += [
            helper.make_node("Cast", ["product"], ["index"], name="tip", to=TensorProto.INT64),
            helper.make_node("Cast", ["index"], ["y"], name="narrow", to=planted_models.FLOAT),
        ]
    else:
        nodes.append(NARROW)
    if code == "out-of-range":
        weight[0, 0] = 1e300
    model = ir.load(
        planted_models.save_graph(tmp_path / "model.onnx", nodes, [planted_models.constant("weight", weight)])
    )
    if code == "port":
        model.graph.outputs[0].dtype = ir.DataType.DOUBLE
        model.graph.node("narrow").attributes["to"] = ir.AttrInt64("to", planted_models.DOUBLE)
    if code == "integers":
        model.graph.node("product").outputs[0].dtype = ir.DataType.DOUBLE
    report = run_pass(model, "single_precision")
    assert report.changes == []
    assert [(s.where, s.reason.code) for s in report.skips] == [(location, f"single_precision.{code}")]
    assert ir.DataType.DOUBLE in types(model)


def test_infinite_numbers_are_in_range(tmp_path: Path) -> None:
    """Masks are made of them."""
    weight = planted_models.floats(128, 256).astype(np.float64)
    weight[0] = -np.inf
    nodes = [WIDEN, helper.make_node("MatMul", ["wide", "weight"], ["product"], name="product"), NARROW]
    model = ir.load(
        planted_models.save_graph(tmp_path / "model.onnx", nodes, [planted_models.constant("weight", weight)])
    )
    assert len(run_pass(model, "single_precision").changes) == 1
    assert ir.DataType.DOUBLE not in types(model)
