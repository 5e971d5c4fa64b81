"""onnxruntime's own MatMulNBits says what its codes mean; a product of dequantized codes must say the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from graphopt.graph.weights import Inline
from graphopt.passes.base import PassReport
from graphopt.passes.codes.unfuse_products import (
    BY_INPUT,
    NOT_CONSTANT,
    NOT_FLOAT,
    OTHER_BITS,
    OTHER_LEVEL,
    OTHER_TARGET,
    SHARED_CODES,
    SpreadCodes,
    UnfuseProducts,
)
from graphopt.passes.context import make_context
from graphopt.tasks.registry import task_of
from tests.graphs import run_pass, session

MICROSOFT = "com.microsoft"
ROWS, COLUMNS, GROUP = 96, 48, 32


def fused(
    bits: int = 4, zeros: str = "none", level: int = 0, bias: bool = False, rows: int = ROWS, dtype: type = np.float32
) -> ir.Model:
    """Return y = MatMulNBits(x, codes, scales, zero points, g_idx, bias) of random codes."""
    random, groups = np.random.default_rng(bits), -(-rows // GROUP)
    weights = {
        "codes": random.integers(0, 256, (COLUMNS, groups, GROUP * bits // 8), np.uint8),
        "scales": random.uniform(-0.02, 0.02, COLUMNS * groups).astype(dtype),
    }
    names = ["x", "codes", "scales", "", "", ""]
    if zeros == "bytes":
        weights["zeros"] = random.integers(0, 256, COLUMNS * -(-groups * bits // 8), np.uint8)
    elif zeros != "none":
        whole = random.integers(0, 1 << bits, COLUMNS * groups)
        weights["zeros"] = (whole + (0.5 if zeros == "between" else 0)).astype(dtype)
    if zeros != "none":
        names[3] = "zeros"
    if bias:
        weights["bias"], names[5] = random.standard_normal(COLUMNS).astype(dtype), "bias"
    attributes = {"K": rows, "N": COLUMNS, "bits": bits, "block_size": GROUP, "accuracy_level": level}
    while not names[-1]:
        names.pop()
    node = helper.make_node("MatMulNBits", names, ["y"], name="product", domain=MICROSOFT, **attributes)
    return model_of([node], weights, rows, TensorProto.FLOAT if dtype is np.float32 else TensorProto.FLOAT16)


def model_of(
    nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], rows: int, dtype: int = TensorProto.FLOAT
) -> ir.Model:
    inputs = [helper.make_tensor_value_info("x", dtype, ["batch", rows])]
    if len(nodes) > 1:
        inputs.append(helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch"]))
    outputs = [helper.make_tensor_value_info(node.output[0], dtype, None) for node in nodes if node.output[0] in "ye"]
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "fused", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def unfuse(model: ir.Model, target: str = "ort-cpu") -> PassReport:
    report: PassReport = UnfuseProducts()(model, make_context(task_of(model.graph), target=target)).report  # type: ignore[arg-type]
    return report


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [ROWS, ROWS - 10])
# onnxruntime has no kernel for 8 bits with zero points in floats.
@pytest.mark.parametrize(
    ("bits", "zeros"), [(4, "none"), (4, "bytes"), (4, "whole"), (4, "between"), (8, "none"), (8, "bytes")]
)
def test_codes_mean_what_onnxruntime_says(bits: int, zeros: str, rows: int, bias: bool, tmp_path: Path) -> None:
    model = fused(bits, zeros, bias=bias, rows=rows)
    x = np.eye(rows, dtype=np.float32)
    (before,) = session(model, tmp_path / "before").run(None, {"x": x})
    report = unfuse(model)
    assert not report.skips
    kinds = [node.op_type for node in model.graph]
    reader = "Dequantize" if zeros == "between" else "DequantizeLinear"
    assert kinds == [reader, "MatMul", *(["Add"] if bias else [])]
    (after,) = session(model, tmp_path / "after").run(None, {"x": x})
    # Scales of 0.02 times 255 steps: 5, and one rounding of float32 in the product, one in the sum with the bias.
    np.testing.assert_allclose(after, before, atol=2e-6, rtol=0)
    if rows == ROWS:  # kernels of ours take whole units of 16 rows
        run_pass(model, "lower", target="ort-cpu")
        assert "MatMulTable" in [node.op_type for node in model.graph]
        (lowered,) = session(model, tmp_path / "lowered").run(None, {"x": x})
        np.testing.assert_allclose(lowered, before, atol=2e-6, rtol=0)


def test_the_level_of_int8_becomes_a_rounding_in_groups(tmp_path: Path) -> None:
    model = fused(level=4)
    x = np.random.default_rng(1).standard_normal((7, ROWS)).astype(np.float32)
    (before,) = session(model, tmp_path / "before").run(None, {"x": x})
    unfuse(model)
    (rounding,) = [node for node in model.graph if node.op_type == "RoundActivations"]
    assert rounding.attributes.get_string("activations") == "int8"
    assert rounding.attributes.get_int("group") == GROUP
    run_pass(model, "lower", target="ort-cpu")
    (after,) = session(model, tmp_path / "after").run(None, {"x": x})
    # The same integers; where onnxruntime's division and ours round to two sides of a half, a step of 1/127 of the
    # largest number of a group, times a weight of at most 0.16.
    assert np.abs(after - before).max() <= 2 * np.abs(x).max() / 127 * 0.16


@pytest.mark.parametrize("zeros", ["none", "bytes"])
def test_a_lookup_of_the_same_codes_reads_columns(zeros: str, tmp_path: Path) -> None:
    model = fused(zeros=zeros)
    proto = ir.to_proto(model)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    weights["scales"] = weights["scales"].reshape(COLUMNS, -1)
    weights["shape"] = np.array([COLUMNS, ROWS // 2])
    if zeros == "bytes":
        weights["zeros"] = weights["zeros"].reshape(COLUMNS, -1)
    names = ["flat", "ids", "scales", *(["zeros"] if zeros == "bytes" else [])]
    attributes = {"gather_axis": 0, "quantize_axis": 1, "block_size": GROUP, "bits": 4}
    lookup = helper.make_node("GatherBlockQuantized", names, ["e"], name="lookup", domain=MICROSOFT, **attributes)
    flat = helper.make_node("Reshape", ["codes", "shape"], ["flat"], name="flat")
    model = model_of([*proto.graph.node, flat, lookup], weights, ROWS)
    feeds = {"x": np.eye(ROWS, dtype=np.float32), "ids": np.array([3, 47, 0])}
    before = session(model, tmp_path / "before").run(["y", "e"], feeds)
    assert not unfuse(model).skips
    run_pass(model, "lower", target="ort-cpu")
    assert sorted(node.op_type for node in model.graph) == ["GatherTable", "MatMulTable"]
    after = session(model, tmp_path / "after").run(["y", "e"], feeds)
    np.testing.assert_allclose(after[0], before[0], atol=2e-6, rtol=0)
    np.testing.assert_array_equal(after[1], before[1])


def test_what_stays_says_why() -> None:
    portable, other_bits, other_level = fused(), fused(bits=2), fused(level=2)
    half, computed, shared = fused(dtype=np.float16), fused(), fused()
    computed.graph.inputs.append(computed.graph.initializers.pop("scales"))
    reader = ir.node("Identity", [shared.graph.initializers["codes"]], name="reader")
    shared.graph.insert_before(shared.graph[0], reader)
    shared.graph.outputs.append(reader.outputs[0])
    listed = fused()
    groups = ir.val("groups", const_value=ir.tensor(np.arange(ROWS, dtype=np.int32) // GROUP, name="groups"))
    listed.graph.register_initializer(groups)
    node = listed.graph.node("product")
    node.resize_inputs(5)
    node.replace_input_with(4, groups)
    reasons = {
        NOT_CONSTANT(): computed,
        NOT_FLOAT(type="FLOAT16"): half,
        OTHER_BITS(bits=2): other_bits,
        OTHER_LEVEL(level=2): other_level,
        SHARED_CODES(other="reader"): shared,
        BY_INPUT(): listed,
    }
    for reason, model in reasons.items():
        report = unfuse(model)
        assert [skip.reason for skip in report.skips] == [reason]
        assert "product" in [node.name for node in model.graph if node.op_type == "MatMulNBits"]
    assert [skip.reason for skip in unfuse(portable, "portable").skips] == [OTHER_TARGET(target="portable")]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_codes_come_back_from_their_bytes(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from([4, 8]))
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 9))
    codes = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 1 << bits, (rows, columns), np.uint8)
    padded = np.zeros((columns, rows + rows % 2), np.uint8)
    padded[:, :rows] = codes.T
    packed = padded if bits == 8 else padded[:, ::2] | padded[:, 1::2] << np.uint8(4)
    expression = SpreadCodes(Inline.from_array(packed), bits, rows, columns, ir.DataType.UINT8)
    np.testing.assert_array_equal(expression.numpy(), codes)
    signed_type = ir.DataType.INT4 if bits == 4 else ir.DataType.INT8
    signed = SpreadCodes(Inline.from_array(packed), bits, rows, columns, signed_type).numpy()
    np.testing.assert_array_equal(signed.astype(np.int16), codes.astype(np.int16) - (1 << (bits - 1)))
