"""Untrusted model files: one node whose inputs may be wrong, and the ways in which any of them is corrupted."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from hypothesis import strategies as st
from onnx import helper

from graphopt.runtime_ops import DOMAIN, OPERATORS, library_path

NODE = "the node of a stranger"

INTEGERS = [
    0,
    1,
    -1,
    15,
    16,
    17,
    31,
    32,
    255,
    2**31 - 1,
    2**31,
    2**32,
    2**32 + 16,
    2**62,
    2**63 - 1,
    -(2**31),
    -(2**63),
]
FLOATS = [0.0, -0.0, 1.0, -1.0, 1.5, 1e-45, 1e-30, 3.4e38, -3.4e38, float("inf"), float("-inf"), float("nan")]
TYPES = [np.float32, np.float64, np.float16, np.int8, np.uint8, np.int64, np.uint16]


@dataclass
class Tensor:
    """An input of the node, and what the file says of it."""

    values: np.ndarray
    where: str = "graph"  # or "file": external data, "fed": an input of the graph, "nowhere": left out
    says: list[int] | None = None  # a shape that is not that of the values
    cut: int = 0  # bytes of the data that are missing at the end
    offset: int | None = None  # in the file of external data, where it is not the one that the data has
    shift: int = 0  # bytes before the data in the file, so that it is misaligned
    length: int | None = None

    def said(self) -> np.ndarray:
        """The values in the shape that the file declares, if it declares one; its size must be theirs."""
        return self.values if self.says is None or self.where == "fed" else self.values.reshape(self.says)


@dataclass
class Case:
    operator: str
    inputs: dict[str, Tensor]
    attributes: dict[str, Any] = field(default_factory=dict)
    version: int = 1
    start: int = 3  # bytes in front of all external data

    def model(self, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
        """Write the file; return it, and what is to be fed."""
        names, initializers, inputs, fed = [], [], [], {}
        data = bytearray(b"\xa5" * self.start)
        for name, tensor in self.inputs.items():
            names.append(name if tensor.where != "nowhere" else "")
            if tensor.where == "nowhere":
                continue
            if tensor.where == "fed":
                fed[name] = tensor.values
                type_ = helper.np_dtype_to_tensor_dtype(tensor.values.dtype)
                inputs.append(helper.make_tensor_value_info(name, type_, None))
                continue
            shape = list(tensor.values.shape) if tensor.says is None else tensor.says
            raw = tensor.values.tobytes()
            # In external data a length of 0 means that none is stated: onnxruntime would read on, into the next tensor.
            least = min(1, len(raw)) if tensor.where == "file" else 0
            raw = raw[: max(least, len(raw) - tensor.cut)]
            proto = onnx.TensorProto(
                name=name, data_type=helper.np_dtype_to_tensor_dtype(tensor.values.dtype), dims=shape
            )
            if tensor.where == "graph":
                proto.raw_data = raw
            else:
                data += b"\xa5" * tensor.shift
                offset = len(data) if tensor.offset is None else tensor.offset
                length = len(raw) if tensor.length is None else tensor.length
                proto.data_location = onnx.TensorProto.EXTERNAL
                for key, value in (("location", "data"), ("offset", offset), ("length", length)):
                    proto.external_data.add(key=key, value=str(value))
                data += raw
            initializers.append(proto)
        node = helper.make_node(self.operator, names, ["y"], name=NODE, domain=DOMAIN)
        node.attribute.extend(attribute(name, value) for name, value in self.attributes.items())
        output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
        graph = helper.make_graph([node], "hostile", inputs, [output], initializers)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, self.version)]
        (folder / "data").write_bytes(data)
        (folder / "model.onnx").write_bytes(
            helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
        )
        return folder / "model.onnx", fed


def attribute(name: str, value: Any) -> onnx.AttributeProto:
    """``make_attribute`` refuses an empty list."""
    return (
        onnx.AttributeProto(name=name, type=onnx.AttributeProto.INTS)
        if value == []
        else helper.make_attribute(name, value)
    )


def run(file: Path, fed: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    # Each tensor in memory of its own, so that the sanitizer sees where it ends; and nothing folded away.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    options.register_custom_ops_library(str(library_path()))
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return session.run(None, fed)[0]


def examples(usual: int) -> int:
    """Return how many cases to draw: ``usual``, or what ``make test-native`` asks for."""
    return int(os.environ.get("GRAPHOPT_HOSTILE_EXAMPLES", usual))


def other_shape(draw: st.DrawFn, shape: list[int]) -> list[int]:
    """Return another shape than ``shape``, which may change."""
    axis = draw(st.integers(0, len(shape)))
    match draw(st.sampled_from(["add", "remove", "resize", "resize", "scalar", "many"])):
        case "add":
            shape.insert(axis, draw(st.integers(0, 2)))
        case "many":
            shape = [1] * (7 - len(shape)) + shape
        case "scalar":
            shape = []
        case "remove" if shape:
            shape.pop(axis % len(shape))
        case _ if shape:
            size = shape[axis % len(shape)]
            shape[axis % len(shape)] = draw(st.sampled_from([0, 1, max(0, size - 1), size + 1, 2 * size, 16, 33]))
    return shape


def other_attribute(
    draw: st.DrawFn, attributes: dict[str, Any], integers: list[int], strings: list[str | bytes]
) -> None:
    """Change one attribute: its value, to one of those given if it is of that type, or its type; or take it away."""
    if not attributes:
        return
    name = draw(st.sampled_from(sorted(attributes)))
    value = attributes[name]
    match draw(st.sampled_from(["value", "value", "value", "type", "gone"])):
        case "gone":
            del attributes[name]
        case "type":
            attributes[name] = draw(st.sampled_from([1, 1.0, "int8", [1, 2], [1.5], [], ["a"]]))
        case _ if isinstance(value, float):
            attributes[name] = draw(st.sampled_from(FLOATS))
        case _ if isinstance(value, int):
            attributes[name] = draw(st.sampled_from(integers))
        case _ if isinstance(value, list):
            attributes[name] = draw(st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**32, 2**63 - 1]), max_size=4))
        case _:
            attributes[name] = draw(st.sampled_from(strings))


def check(case: Case, folder: Path) -> np.ndarray | None:
    """A kernel's error names the node; a result is the operator's."""
    file, fed = case.model(folder)
    try:
        y = run(file, fed)
    except Exception as error:
        # onnxruntime refuses some by itself, before it calls a kernel, with its own message
        says = str(error)
    else:
        says = ""
    if says:
        # its allocator speaks for itself: a size that no integer holds
        assert "[ONNXRuntimeError]" in says or "onnxruntime/core/common/safeint.h" in says
        assert f"ai.graphopt node '{NODE}'" in says or "ai.graphopt node" not in says
        return None
    arguments = [tensor.said() for tensor in case.inputs.values()]
    with np.errstate(all="ignore"):
        expected = OPERATORS[case.operator].reference(*arguments, **case.attributes)
    data = OPERATORS[case.operator].schema.data
    assert (y.shape, y.dtype) == (expected.shape, np.float32 if data is None else arguments[0].dtype)
    as_given = all(tensor.offset is None for tensor in case.inputs.values())
    # Bytes of levels may hold steps that are not finite, which the arguments do not show.
    is_finite = as_given and np.isfinite(expected).all()
    if is_finite and all(np.isfinite(a).all() and np.abs(a).max(initial=0) < 1e4 for a in arguments):
        # Other tests check the error. Here it is enough that it was computed from these numbers and no others.
        assert np.abs(y - expected).max(initial=0) <= largest(case)
    return y


def largest(case: Case) -> float:
    """A bound on what rounding to few bits moves a result by."""
    if case.operator == "GatherTable":
        return 0  # two operations of float32 that are defined
    numbers = [tensor.values for name, tensor in case.inputs.items() if name != "experts"]
    x, *others = (array.astype(np.float64) for array in numbers)
    size = np.abs(x).max(initial=0)
    if case.operator == "SwiGLU":
        return 1e-3 * size * size  # of a product of two halves; float16 has 2^-11
    if case.operator == "Hadamard":
        return 1e-2 * size * np.sqrt(len(others[0]) * len(others[1]))
    if case.operator == "MatMulCodebook":
        scales, level_table, books, shifts = (np.abs(others[index]).max(initial=0) for index in (1, 3, 4, 5))
        return 1e-5 * size * (2 * books + shifts + level_table) * level_table * scales * x.shape[-1]
    _, scales, table, zero_points, _, *matrices = others
    weight = (np.abs(table).max() + np.abs(zero_points).max()) * np.abs(scales).max()
    turned = np.sqrt(np.prod([len(matrix) for matrix in matrices]))
    is_rounded_in_groups = case.operator in ("MatMulTable", "MatMulExperts")
    step = 0.02 if is_rounded_in_groups else 1 - case.attributes["clip"] + 2 / case.attributes["bits"] ** 1.5
    return step * size * turned * weight * x.shape[-1]
