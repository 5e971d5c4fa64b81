"""Codes that are transposed before their product are stored as the product reads them, and onnxruntime fuses it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from graphopt.ort.session import open_session
from tests.compile.doctor import planted_models
from tests.graphs import run_pass, save

N, K, GROUP = 256, 128, 32


def stored(path: Path, granularity: str, *, axis_sign: int = 0) -> ir.Model:
    """``x [.., K] @ Transpose(DequantizeLinear(codes [N, K]))`` with scales per group, per row or of the tensor."""
    random = np.random.default_rng(7)
    shape = {"group": (N, K // GROUP), "row": (N,), "tensor": ()}[granularity]
    scales = (random.random(shape) / 1000 + 1e-4).astype(np.float32)
    zeros = random.integers(-3, 4, shape).astype(np.int8)
    attributes = {"group": {"axis": 1 - 2 * axis_sign, "block_size": GROUP}, "row": {"axis": 0}, "tensor": {}}
    nodes = [
        helper.make_node(
            "DequantizeLinear", ["codes", "scales", "zeros"], ["wide"], name="decode", **attributes[granularity]
        ),
        helper.make_node("Transpose", ["wide"], ["weight"], name="turn", perm=[1, 0]),
        helper.make_node("MatMul", ["x", "weight"], ["y"], name="product"),
    ]
    codes = planted_models.constant("codes", random.integers(-128, 128, (N, K), np.int8))
    weights = [
        codes,
        planted_models.constant("scales", np.array(scales)),
        planted_models.constant("zeros", np.array(zeros)),
    ]
    return ir.load(planted_models.save_graph(path, nodes, weights))


def decoded(model: ir.Model, value: str, path: Path) -> np.ndarray:
    """What onnxruntime decodes."""
    proto = ir.to_proto(model)
    proto.graph.output.append(helper.make_tensor_value_info(value, planted_models.FLOAT, None))
    onnx.save(proto, path)
    result: np.ndarray = open_session(path).run([value], {"x": np.zeros((1, K), np.float32)})[0]
    return result


@pytest.mark.parametrize(("granularity", "axis_sign"), [("group", 0), ("group", 1), ("row", 0), ("tensor", 0)])
def test_the_same_weight_to_the_bit(granularity: str, axis_sign: int, tmp_path: Path) -> None:
    model = stored(tmp_path / "model.onnx", granularity, axis_sign=axis_sign)
    before = decoded(model, "weight", tmp_path / "before.onnx")
    report = run_pass(model, "transpose_codes")
    assert report.effect == "exact"
    assert [c.what.figures for c in report.changes] == [{"weight": "codes", "rows": "128", "columns": "256"}]
    assert [node.op_type for node in model.graph] == ["DequantizeLinear", "MatMul"]
    assert "codes" not in model.graph.initializers
    name = model.graph[0].outputs[0].name or ""
    np.testing.assert_array_equal(decoded(model, name, tmp_path / "after.onnx"), before)
    assert not run_pass(model, "transpose_codes").changes


def test_onnxruntime_fuses_what_it_did_not(tmp_path: Path) -> None:
    model = stored(tmp_path / "model.onnx", "group")

    def fused(folder: Path) -> bool:
        folder.mkdir()
        open_session(save(model, folder), optimized_to=folder / "optimized.onnx")
        return "MatMulNBits" in [node.op_type for node in ir.load(folder / "optimized.onnx").graph]

    assert not fused(tmp_path / "before")
    run_pass(model, "transpose_codes")
    assert fused(tmp_path / "after")


def test_computed_scales_stay_with_the_reason(tmp_path: Path) -> None:
    model = stored(tmp_path / "model.onnx", "group")
    tape = ir.tape.Tape()
    decode = model.graph.node("decode")
    scales = tape.op("Abs", [decode.inputs[1]])
    model.graph.insert_before(decode, tape.nodes)
    decode.replace_input_with(1, scales)
    report = run_pass(model, "transpose_codes")
    assert not report.changes
    assert [(s.where, s.reason.code) for s in report.skips] == [("decode", "transpose_codes.computed")]
    assert [node.op_type for node in model.graph] == ["Abs", "DequantizeLinear", "Transpose", "MatMul"]


def test_codes_that_another_node_reads_are_kept_for_it(tmp_path: Path) -> None:
    model = stored(tmp_path / "model.onnx", "row")
    tape = ir.tape.Tape()
    other = tape.op("Identity", [model.graph.node("decode").outputs[0]])
    other.name, other.dtype, other.shape = "table", ir.DataType.FLOAT, ir.Shape([N, K])
    model.graph.extend(tape.nodes)
    model.graph.outputs.append(other)
    run_pass(model, "transpose_codes")
    assert {"codes", "codes.transposed"} <= set(model.graph.initializers)
    y, table = open_session(save(model, tmp_path, "both.onnx")).run(None, {"x": np.eye(K, dtype=np.float32)})
    assert np.abs(y - table.T).max() <= 2e-2 * np.abs(table).max()  # inputs to int8 in groups: 1/254, and half a step
