"""Graphs with one fault each: files as other tools write them; ``times`` makes both sides of their matrix larger."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MICROSOFT = "com.microsoft"
FLOAT, DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE
RANDOM = np.random.default_rng(0)


def constant(name: str, array: np.ndarray) -> onnx.TensorProto:
    return numpy_helper.from_array(array, name)


def floats(*shape: int) -> np.ndarray:
    return (np.random.default_rng(shape[0]).standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def save_graph(
    path: Path,
    nodes: list[onnx.NodeProto],
    weights: list[onnx.TensorProto],
    *,
    times: int = 1,
    output: int = 256,
    opset: int = 23,
    shape: list[object] | None = None,
) -> Path:
    graph = helper.make_graph(
        nodes,
        "planted",
        [helper.make_tensor_value_info("x", FLOAT, shape or ["batch", 128 * times])],
        [helper.make_tensor_value_info("y", FLOAT, ["batch", output * times] if shape is None else None)],
        weights,
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def products_with_codes(
    path: Path, times: int = 1, *, bits: int = 4, zeros: str = "none", level: int = 0, rest_columns: int = 0
) -> Path:
    """A ``MatMulNBits`` of 128 x 256 in groups of 32; ``rest_columns``: columns of a product in floats behind it."""
    rows, columns, group = 128 * times, 256 * times, 32
    groups = rows // group
    random = np.random.default_rng(bits)
    codes = random.integers(0, 256, (columns, groups, group * bits // 8), np.uint8)
    scales = (random.random(columns * groups) / 50 + 0.01).astype(np.float32)
    weights = [constant("codes", codes), constant("scales", scales)]
    names = ["x", "codes", "scales"]
    if zeros != "none":
        numbers = random.integers(0, 1 << bits, columns * groups).astype(np.float32)
        weights.append(constant("zeros", numbers + (0.5 if zeros == "between" else 0)))
        names.append("zeros")
    attributes = {"K": rows, "N": columns, "bits": bits, "block_size": group}
    if level:
        attributes["accuracy_level"] = level
    out = "h" if rest_columns else "y"
    nodes = [helper.make_node("MatMulNBits", names, [out], name="product", domain=MICROSOFT, **attributes)]
    if rest_columns:
        nodes.append(helper.make_node("MatMul", ["h", "float_weight"], ["y"], name="float_product"))
        weights.append(constant("float_weight", floats(columns, rest_columns * times)))
    return save_graph(path, nodes, weights, times=times, output=rest_columns or 256)


def repeated_products(path: Path, times: int = 1) -> Path:
    weight = floats(128 * times, 256 * times)
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["a"], name="a"),
        helper.make_node("MatMul", ["x", "second"], ["b"], name="b"),
        helper.make_node("Mul", ["a", "b"], ["y"], name="both"),
    ]
    return save_graph(path, nodes, [constant("first", weight), constant("second", weight.copy())], times=times)


def computed_constants(path: Path, times: int = 1) -> Path:
    nodes = [
        helper.make_node("Mul", ["stored", "factor"], ["scaled"], name="scale"),
        helper.make_node("Transpose", ["scaled"], ["weight"], name="turn", perm=[1, 0]),
        helper.make_node("MatMul", ["x", "weight"], ["y"], name="product"),
    ]
    return save_graph(
        path,
        nodes,
        [constant("stored", floats(256 * times, 128 * times)), constant("factor", np.float32([[0.5]]))],
        times=times,
    )


def doubles(path: Path, times: int = 1) -> Path:
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], name="widen", to=DOUBLE),
        helper.make_node("MatMul", ["wide", "weight"], ["product"], name="product"),
        helper.make_node("Cast", ["product"], ["y"], name="narrow", to=FLOAT),
    ]
    return save_graph(
        path, nodes, [constant("weight", floats(128 * times, 256 * times).astype(np.float64))], times=times
    )


def casts(path: Path, times: int = 1) -> Path:
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["h"], name="product"),
        helper.make_node("Cast", ["h"], ["wide"], name="there", to=DOUBLE),
        helper.make_node("Cast", ["wide"], ["back"], name="back", to=FLOAT),
        helper.make_node("Relu", ["back"], ["y"], name="relu"),
    ]
    return save_graph(path, nodes, [constant("weight", floats(128 * times, 256 * times))], times=times)


def body(path: Path) -> Path:
    """``Swish``, which onnxruntime 1.31 has no kernel for, behind a product."""
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["h"], name="product"),
        helper.make_node("Swish", ["h"], ["y"], name="swish"),
    ]
    return save_graph(path, nodes, [constant("weight", floats(128, 256))], opset=24)


def transposed_codes(path: Path, times: int = 1) -> Path:
    codes = np.random.default_rng(3).integers(-128, 128, (256 * times, 128 * times), np.int8)
    nodes = [
        helper.make_node("DequantizeLinear", ["codes", "scales"], ["wide"], name="decode", axis=1, block_size=32),
        helper.make_node("Transpose", ["wide"], ["weight"], name="turn", perm=[1, 0]),
        helper.make_node("MatMul", ["x", "weight"], ["y"], name="product"),
    ]
    scales = (np.random.default_rng(4).random((256 * times, 4 * times)) / 1000 + 1e-4).astype(np.float32)
    return save_graph(path, nodes, [constant("codes", codes), constant("scales", scales)], times=times)


def relu_behind(path: Path, times: int = 1) -> Path:
    codes = np.random.default_rng(3).integers(-128, 128, (128 * times, 256 * times), np.int8)
    nodes = [
        helper.make_node("DequantizeLinear", ["codes", "scales"], ["weight"], name="decode", axis=0, block_size=32),
        helper.make_node("MatMul", ["x", "weight"], ["h"], name="product"),
        helper.make_node("Relu", ["h"], ["y"], name="relu"),
    ]
    scales = (np.random.default_rng(4).random((4 * times, 256 * times)) / 1000 + 1e-4).astype(np.float32)
    return save_graph(path, nodes, [constant("codes", codes), constant("scales", scales)], times=times)


def experts(path: Path) -> Path:
    """Two experts of one product with codes behind them, chosen by a constant."""
    file = products_with_codes(path, level=4)
    model = onnx.load(file)
    model.graph.node[0].output[0] = "h"
    model.graph.node.extend(
        [
            helper.make_node("Gather", ["stack", "chosen"], ["expert"], name="choose", axis=0),
            helper.make_node("MatMul", ["h", "expert"], ["y"], name="expert_product"),
            helper.make_node("ArgMax", ["x0"], ["chosen"], name="router", axis=0, keepdims=0),
        ]
    )
    model.graph.node.insert(0, helper.make_node("ReduceMean", ["x", "rows"], ["x0"], name="mean", keepdims=0))
    nodes = list(model.graph.node)
    order = [nodes[0], nodes[1], nodes[4], nodes[2], nodes[3]]
    del model.graph.node[:]
    model.graph.node.extend(order)
    stack = np.stack([floats(256, 256)] * 128)[:, :16, :] * np.arange(1, 129, dtype=np.float32)[:, None, None]
    model.graph.initializer.extend([constant("stack", np.tile(stack, (1, 16, 1))), constant("rows", np.array([0]))])
    onnx.save(model, file)
    return file


def not_finite(path: Path) -> Path:
    nodes = [
        helper.make_node("Sub", ["x", "x"], ["zero"], name="zero"),
        helper.make_node("Div", ["x", "zero"], ["infinite"], name="divide"),
        helper.make_node("MatMul", ["infinite", "weight"], ["y"], name="product"),
    ]
    return save_graph(path, nodes, [constant("weight", floats(128, 256))])
