"""Small graphs without text: sound through a branch with a recurrence, pictures, tables of integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def constant(name: str, array: np.ndarray) -> onnx.TensorProto:
    return numpy_helper.from_array(array, name)


def save_graph(path: Path, graph: onnx.GraphProto, opset: int = 18) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def sound(path: Path) -> Path:
    """Sound [?, ?] and a state [2, ?, 8], by a rate of 8000 or 16000: a branch each, with an LSTM, and a product."""
    random = np.random.default_rng(0)

    def branch(name: str, stride: int) -> onnx.GraphProto:
        prefix = f"{name}."
        weights = [
            constant(prefix + "taps", random.standard_normal((16, 1, 32)).astype(np.float32) / 8),
            constant(prefix + "w", random.standard_normal((1, 32, 16)).astype(np.float32) / 4),
            constant(prefix + "r", random.standard_normal((1, 32, 8)).astype(np.float32) / 4),
            constant(prefix + "one", np.array([1])),
        ]
        nodes = [
            helper.make_node("Unsqueeze", ["sound", prefix + "one"], [prefix + "wide"]),
            helper.make_node("Conv", [prefix + "wide", prefix + "taps"], [prefix + "bands"], strides=[stride]),
            helper.make_node("Transpose", [prefix + "bands"], [prefix + "steps"], perm=[2, 0, 1]),
            helper.make_node("Split", ["state"], [prefix + "h", prefix + "c"], axis=0, num_outputs=2),
            helper.make_node(
                "LSTM",
                [prefix + "steps", prefix + "w", prefix + "r", "", "", prefix + "h", prefix + "c"],
                ["", prefix + "hn", prefix + "cn"],
                hidden_size=8,
            ),
            helper.make_node("Concat", [prefix + "hn", prefix + "cn"], [prefix + "next"], axis=0),
            helper.make_node("Identity", [prefix + "next"], [prefix + "out"]),
        ]
        output = helper.make_tensor_value_info(prefix + "out", TensorProto.FLOAT, [2, None, 8])
        return helper.make_graph(nodes, name, [], [output], weights)

    nodes = [
        helper.make_node("Equal", ["rate", "rate.high"], ["is_high"]),
        helper.make_node("If", ["is_high"], ["next"], then_branch=branch("high", 16), else_branch=branch("low", 8)),
        helper.make_node("ReduceMean", ["next", "axes"], ["features"], keepdims=0),
        helper.make_node("MatMul", ["features", "head"], ["scores"], name="head_product"),
    ]
    inputs = [
        helper.make_tensor_value_info("sound", TensorProto.FLOAT, [None, None]),
        helper.make_tensor_value_info("state", TensorProto.FLOAT, [2, None, 8]),
        helper.make_tensor_value_info("rate", TensorProto.INT64, []),
    ]
    outputs = [
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, [None, 24]),
        helper.make_tensor_value_info("next", TensorProto.FLOAT, [2, None, 8]),
    ]
    weights = [
        constant("rate.high", np.array(16000)),
        constant("axes", np.array([0])),
        constant("head", random.standard_normal((8, 24)).astype(np.float32)),
    ]
    return save_graph(path, helper.make_graph(nodes, "sound", inputs, outputs, weights))


def picture(path: Path, opset: int = 11) -> Path:
    """Pictures [N, 3, H, W] whose sides are multiples of 16: a convolution, then products; initializers are inputs."""
    random = np.random.default_rng(1)
    weights = [
        constant("taps", random.standard_normal((32, 3, 16, 16)).astype(np.float32) / 28),
        constant("up", random.standard_normal((32, 128)).astype(np.float32) / 6),
        constant("down", random.standard_normal((128, 10)).astype(np.float32) / 11),
        constant("bias", random.standard_normal(10).astype(np.float32)),
    ]
    nodes = [
        helper.make_node("Conv", ["pixels", "taps"], ["patches"], strides=[16, 16]),
        helper.make_node("GlobalAveragePool", ["patches"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "up"], ["inner"], name="up_product"),
        helper.make_node("Relu", ["inner"], ["active"]),
        helper.make_node("Gemm", ["active", "down", "bias"], ["logits"], name="down_product"),
        helper.make_node("ArgMax", ["logits"], ["label"], axis=1, keepdims=0),
    ]
    inputs = [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["N", 3, "H", "W"])]
    inputs += [helper.make_tensor_value_info(t.name, TensorProto.FLOAT, t.dims) for t in weights]
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 10]),
        helper.make_tensor_value_info("label", TensorProto.INT64, ["N"]),
    ]
    return save_graph(path, helper.make_graph(nodes, "picture", inputs, outputs, weights), opset)


def table(path: Path) -> Path:
    """Integers that index a table of 7 rows, through a cast and a reshape, and lengths."""
    random = np.random.default_rng(2)
    nodes = [
        helper.make_node("Cast", ["kinds"], ["wide"], to=TensorProto.INT64),
        helper.make_node("Reshape", ["wide", "flat"], ["column"]),
        helper.make_node("Gather", ["rows", "column"], ["found"]),
        helper.make_node("MatMul", ["found", "weight"], ["y"], name="product"),
        helper.make_node("Identity", ["lengths"], ["same"]),
    ]
    inputs = [
        helper.make_tensor_value_info("kinds", TensorProto.INT32, ["batch", "fields"]),
        helper.make_tensor_value_info("lengths", TensorProto.INT64, ["batch"]),
        helper.make_tensor_value_info("mask", TensorProto.BOOL, ["batch", "past + fields"]),
    ]
    nodes.append(helper.make_node("Cast", ["mask"], ["masked"], to=TensorProto.FLOAT))
    outputs = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 64]),
        helper.make_tensor_value_info("same", TensorProto.INT64, ["batch"]),
        helper.make_tensor_value_info("masked", TensorProto.FLOAT, [None, None]),
    ]
    weights = [
        constant("flat", np.array([-1])),
        constant("rows", random.standard_normal((7, 32)).astype(np.float32)),
        constant("weight", random.standard_normal((32, 64)).astype(np.float32)),
    ]
    return save_graph(path, helper.make_graph(nodes, "table", inputs, outputs, weights))


def convolutions(path: Path, *, channels: int = 16, norms: bool = False) -> Path:
    """Images [batch, 3, 16, 16] through a residual block and a convolution of single channels to 10 logits.

    Args:
        path: of the file.
        channels: of the block.
        norms: batch normalization behind the first convolution, and a factor and a shift of channels behind the second.
    """
    random = np.random.default_rng(3)

    def floats(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    wide = {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}
    first, second = ("first.norm", "second.shift") if norms else ("first.conv", "second.conv")
    nodes = [
        helper.make_node("Conv", ["images", "first", "first.bias"], ["first.conv"], name="first", **wide),
        helper.make_node("Relu", [first], ["low"], name="relu"),
        helper.make_node("Conv", ["low", "second"], ["second.conv"], name="second", **wide),
        helper.make_node("Add", [second, "low"], ["sum"], name="residual"),
        helper.make_node("Relu", ["sum"], ["block"], name="relu2"),
        helper.make_node("MaxPool", ["block"], ["pooled"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["pooled", "taps", "taps.bias"], ["single"], name="single", group=channels, **wide),
        helper.make_node("Clip", ["single", "none", "six"], ["clipped"], name="clip"),
        helper.make_node("Conv", ["clipped", "last"], ["last.conv"], name="last", strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["last.conv"], ["mean"], name="mean"),
        helper.make_node("Flatten", ["mean"], ["row"], name="flatten"),
        helper.make_node("MatMul", ["row", "head"], ["logits"], name="head_product"),
    ]
    weights = [
        constant("first", floats(channels, 3, 3, 3)),
        constant("first.bias", floats(channels, 4)[:, 0]),
        constant("second", floats(channels, channels, 3, 3)),
        constant("taps", floats(channels, 1, 3, 3)),
        constant("taps.bias", floats(channels, 4)[:, 0]),
        constant("none", np.float32(0).reshape(())),
        constant("six", np.float32(6).reshape(())),
        constant("last", floats(32, channels, 1, 1)),
        constant("head", floats(32, 10)),
    ]
    if norms:
        names = ["first.gain", "first.beta", "first.mean", "first.variance"]
        nodes.insert(1, helper.make_node("BatchNormalization", ["first.conv", *names], ["first.norm"], name="norm"))
        nodes.insert(4, helper.make_node("Mul", ["factors", "second.conv"], ["second.scaled"], name="factor"))
        nodes.insert(5, helper.make_node("Add", ["second.scaled", "shifts"], ["second.shift"], name="shift"))
        vectors = [random.uniform(0.5, 2, channels).astype(np.float32) for _ in range(6)]
        weights += [constant(name, vector) for name, vector in zip(names, vectors, strict=False)]
        shape = (1, channels, 1, 1)
        weights += [constant("factors", vectors[4].reshape(shape)), constant("shifts", vectors[5].reshape(shape))]
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 16, 16])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])
    return save_graph(path, helper.make_graph(nodes, "convolutions", [images], [logits], weights), opset=23)


def shared_heads(path: Path, *, weak: float = 1.0) -> Path:
    """Images [batch, 3, 16, 16] through a pool that tells places, and twice the same convolution, to 8 logits.

    Args:
        path: of the file.
        weak: a factor of the weights of channel 3 of the first convolution, whose bias is 1.
    """
    random = np.random.default_rng(5)
    first, bias = 0.2 * random.standard_normal((8, 3, 3, 3)), random.standard_normal(8)
    first[3] *= weak
    bias[3] = 1
    wide = {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}
    halves = {"kernel_shape": [2, 2], "strides": [2, 2]}
    nodes = [
        helper.make_node("Conv", ["images", "first", "first.bias"], ["first.conv"], name="first", **wide),
        helper.make_node("MaxPool", ["first.conv"], ["pooled", "places"], name="pool", **halves),
        helper.make_node("Conv", ["pooled", "shared", "shared.bias"], ["once"], name="once", **wide),
        helper.make_node("Conv", ["once", "shared", "shared.bias"], ["twice"], name="twice", **wide),
        helper.make_node("GlobalAveragePool", ["twice"], ["mean"], name="mean"),
        helper.make_node("Flatten", ["mean"], ["logits"], name="flatten"),
    ]
    weights = [
        constant("first", first.astype(np.float32)),
        constant("first.bias", bias.astype(np.float32)),
        constant("shared", (0.2 * random.standard_normal((8, 8, 3, 3))).astype(np.float32)),
        constant("shared.bias", random.standard_normal(8).astype(np.float32)),
    ]
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 16, 16])
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 8]),
        helper.make_tensor_value_info("places", TensorProto.INT64, ["batch", 8, 8, 8]),
    ]
    return save_graph(path, helper.make_graph(nodes, "heads", [images], outputs, weights), opset=23)
