"""Weights of recurrences, of transposed convolutions and in branches are int8 in the file, and floats when it runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import graphopt
from graphopt.compile.replay import verify
from graphopt.ort.session import open_session
from graphopt.tasks.encoder import cosines
from tests.graphs import run_pass, session
from tests.tasks.graph import graphs

RANDOM = np.random.default_rng(3)
HIDDEN = 32


def floats(*shape: int) -> np.ndarray:
    return np.asarray(RANDOM.standard_normal(shape) / shape[-1] ** 0.5, np.float32)


def recurrent(path: Path, operator: str = "LSTM", directions: int = 1, *, moved: bool = False) -> Path:
    """A recurrence over x [steps, batch, 32]; ``moved``: its gates are put in order by slices first, as torch does."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[operator]
    shape = (directions, gates * HIDDEN, HIDDEN)
    weights = [graphs.constant("w", floats(*shape)), graphs.constant("r", floats(*shape))]
    nodes, first = [], "w"
    if moved:
        half = gates * HIDDEN // 2
        weights[0] = graphs.constant("w", floats(*shape[1:]))
        bounds = {"zero": [0], "half": [half], "end": [2 * half]}
        weights += [graphs.constant(name, np.array(bound)) for name, bound in bounds.items()]
        nodes = [
            helper.make_node("Slice", ["w", "zero", "half", "zero"], ["low"]),
            helper.make_node("Slice", ["w", "half", "end", "zero"], ["high"]),
            helper.make_node("Concat", ["high", "low"], ["ordered"], axis=0),
            helper.make_node("Unsqueeze", ["ordered", "zero"], ["wide"]),
        ]
        first = "wide"
    direction = "bidirectional" if directions == 2 else "forward"
    nodes.append(helper.make_node(operator, ["x", first, "r"], ["y"], hidden_size=HIDDEN, direction=direction))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["steps", "batch", HIDDEN])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 4)
    return graphs.save_graph(path, helper.make_graph(nodes, "recurrent", [x], [y], weights), opset=23)


X = RANDOM.standard_normal((7, 2, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize(
    ("operator", "directions", "moved"),
    [("LSTM", 1, False), ("LSTM", 2, False), ("LSTM", 1, True), ("GRU", 2, False), ("RNN", 1, False)],
)
def test_weights_of_recurrences_become_codes(operator: str, directions: int, moved: bool, tmp_path: Path) -> None:
    model = ir.load(recurrent(tmp_path / "model.onnx", operator, directions, moved=moved))
    (before,) = session(model, tmp_path / "before").run(None, {"x": X})
    report = run_pass(model, "compress_weights")
    assert report.effect == "lossy"
    assert {change.what.figures["weight"] for change in report.changes} == {"r", "w"}
    weights = {name: value for name, value in model.graph.initializers.items() if "." in name}
    assert {name: value.dtype for name, value in weights.items()} == {
        f"{name}.{part}": kind
        for name in "wr"
        for part, kind in (("codes", ir.DataType.INT8), ("scales", ir.DataType.FLOAT))
    }
    (coded,) = session(model, tmp_path / "codes").run(None, {"x": X})
    # Each weight is off by 0.3% of the largest of its row; what is off comes back through 7 steps.
    assert cosines(before.reshape(1, -1), coded.reshape(1, -1)).min() > 0.9995
    assert len(run_pass(model, "decode_at_load").changes) == 2
    np.testing.assert_array_equal(session(model, tmp_path / "loaded").run(None, {"x": X})[0], coded)
    assert not run_pass(model, "compress_weights").changes


def test_the_file_is_small_and_onnxruntime_reads_floats(tmp_path: Path) -> None:
    file = recurrent(tmp_path / "model.onnx", moved=True)
    weights = graphopt.optimize(file, "int8", tmp_path / "int8").manifest.weights
    # a code, and a scale of 32 bits for 32 codes
    assert weights is not None
    assert weights.bits_per_weight == 9
    assert verify(file, tmp_path / "int8").checks[0].status == "proved"
    open_session(tmp_path / "int8" / "model.onnx", optimized_to=tmp_path / "optimized.onnx")
    assert [node.op_type for node in ir.load(tmp_path / "optimized.onnx").graph] == ["LSTM"]


def branches(path: Path) -> Path:
    """A ``Gemm`` in each branch, one of whose weights is a constant of it, and a ``ConvTranspose`` behind."""

    def branch(name: str, transposed: int) -> onnx.GraphProto:
        shape = (48, 32) if transposed else (32, 48)
        nodes = [helper.make_node("Gemm", ["x", f"{name}.w"], [f"{name}.y"], transB=transposed)]
        output = helper.make_tensor_value_info(f"{name}.y", TensorProto.FLOAT, ["batch", 48])
        return helper.make_graph(nodes, name, [], [output], [graphs.constant(f"{name}.w", floats(*shape))])

    nodes = [
        helper.make_node("If", ["is_large"], ["z"], then_branch=branch("then", 1), else_branch=branch("else", 0)),
        helper.make_node("Reshape", ["z", "dims"], ["image"]),
        helper.make_node("ConvTranspose", ["image", "up"], ["y"], strides=[2, 2]),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 32]),
        helper.make_tensor_value_info("is_large", TensorProto.BOOL, []),
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 4)
    weights = [graphs.constant("dims", np.array([-1, 12, 2, 2])), graphs.constant("up", floats(12, 24, 2, 2))]
    return graphs.save_graph(path, helper.make_graph(nodes, "branches", inputs, [output], weights), opset=23)


def test_constants_of_branches_and_transposed_convolutions_become_codes(tmp_path: Path) -> None:
    model = ir.load(branches(tmp_path / "model.onnx"))
    x = RANDOM.standard_normal((3, 32)).astype(np.float32)
    feeds = [{"x": x, "is_large": np.array(is_large)} for is_large in (True, False)]
    before = [session(model, tmp_path / "before").run(None, each)[0] for each in feeds]
    report = run_pass(model, "compress_weights")
    assert {change.what.figures["op_type"] for change in report.changes} == {"Gemm", "ConvTranspose"}
    assert {name for graph in model.graphs() for name in graph.initializers if not name.endswith("s")} == set()
    scales = {name: value.shape for name, value in model.graph.initializers.items() if name.endswith(".scales")}
    assert {str(shape) for shape in scales.values()} == {"[48]", "[24]"}
    coded = [session(model, tmp_path / "codes").run(None, each)[0] for each in feeds]
    run_pass(model, "decode_at_load")
    assert all(node.op_type != "DequantizeLinear" for node in model.graph.all_nodes())
    loaded = session(model, tmp_path / "loaded")
    for each, expected, codes in zip(feeds, before, coded, strict=True):
        # two roundings to 8 bits in a row
        assert cosines(codes.reshape(3, -1), expected.reshape(3, -1)).min() > 0.999
        np.testing.assert_array_equal(loaded.run(None, each)[0], codes)


def looped(path: Path) -> Path:
    """A loop that hands its weight on from step to step, as TensorFlow does, and a product beside it of the same."""
    step = [
        helper.make_node("MatMul", ["state", "w"], ["sum"], name="inner_product"),
        helper.make_node("Tanh", ["sum"], ["next"]),
        helper.make_node("Identity", ["go"], ["on"]),
        helper.make_node("Identity", ["w"], ["same_w"]),
    ]
    square = [HIDDEN, HIDDEN]
    ports = {"state": ["batch", HIDDEN], "w": square, "next": ["batch", HIDDEN], "same_w": square}
    floats_of = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in ports.items()}
    go, on = (helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("go", "on"))
    inputs = [helper.make_tensor_value_info("n", TensorProto.INT64, []), go, floats_of["state"], floats_of["w"]]
    body = helper.make_graph(step, "step", inputs, [on, floats_of["next"], floats_of["same_w"]])
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["first"], name="outer_product"),
        helper.make_node("Loop", ["steps", "", "first", "weight"], ["y", "last_w"], body=body, name="loop"),
    ]
    ports = {"x": ["batch", HIDDEN], "y": ["batch", HIDDEN]}
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in ports.items())
    weights = [graphs.constant("weight", floats(HIDDEN, HIDDEN)), graphs.constant("steps", np.array(3))]
    return graphs.save_graph(path, helper.make_graph(nodes, "looped", [x], [y], weights), opset=23)


def test_a_weight_of_a_loop_and_of_a_product_beside_it_is_stored_once(tmp_path: Path) -> None:
    file = looped(tmp_path / "model.onnx")
    int8 = graphopt.optimize(file, "int8", tmp_path / "int8").manifest
    assert int8.weights is not None
    assert int8.weights.bits_per_weight == 9  # a code, and a scale of 32 bits for 32 codes
    assert verify(file, tmp_path / "int8").checks[0].status == "proved"
    # Without codes for what the loop reads, the product beside it stays in floats.
    report = graphopt.optimize(file, "int4-rtn", tmp_path / "int4").manifest
    (step,) = (step for step in report.passes if step.name == "quantize_weights")
    assert [skip.reason.code for skip in step.skips if skip.where == "outer_product"] == [
        "quantize_weights.also-inside"
    ]


def test_what_is_small_read_by_others_or_computed_stays(tmp_path: Path) -> None:
    file = recurrent(tmp_path / "model.onnx")
    model = ir.load(file)
    (node,) = model.graph
    sign = ir.node("Neg", [node.inputs[2]], name="sign")
    model.graph.insert_before(node, sign)
    node.replace_input_with(2, sign.outputs[0])
    total = ir.node("ReduceSum", [node.inputs[1]], name="total")
    model.graph.append(total)
    total.outputs[0].name, total.outputs[0].dtype = "total", ir.DataType.FLOAT
    model.graph.outputs.append(total.outputs[0])
    report = run_pass(model, "compress_weights")
    assert not report.changes
    assert {skip.reason.code for skip in report.skips} == {"compress_weights.no-constant", "compress_weights.also-read"}
