"""Hostile model files: an error that names the node, or a result that the operator defines, and never a crash.

A case starts honest and is then spoiled: shapes that lie, codes beyond the table, sizes that overflow, data that ends
early. `make test-native` runs many more of them, against a library that stops at the first invalid access.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from graphopt.rotations import hadamard
from graphopt.runtime_ops import DOMAIN, OPERATORS, library_path

pytestmark = pytest.mark.skipif(library_path() is None, reason="the library of native operators is not built")

EXAMPLES = int(os.environ.get("GRAPHOPT_HOSTILE_EXAMPLES", "100"))
INSTRUCTIONS = ("scalar", "avx2", "avx512")
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
    shift: int = 0  # bytes in front of the data in the file: few of them are a multiple of anything
    length: int | None = None

    def said(self) -> np.ndarray:
        """The values in the shape that the file says, which is no lie where there are as many, or none."""
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
            raw = raw[: max(0, len(raw) - tensor.cut)]
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


# Honest cases.

sizes = st.one_of(st.integers(1, 40), st.sampled_from([1, 15, 16, 17, 32, 48, 64, 96, 128, 160]))


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 9, 13]), max_size=3)))


@st.composite
def honest_hadamard(draw: st.DrawFn) -> Case:
    a, b = (draw(st.sampled_from([1, 2, 4, 8, 12, 16, 20, 28, 32])) for _ in range(2))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (*draw(batches()), a * b * draw(st.integers(0, 3)))
    x = random.standard_normal(shape).astype(draw(st.sampled_from([np.float32, np.float32, np.float64, np.float16])))
    where = draw(st.sampled_from(["graph", "fed", "file"]))
    matrices = {"left": Tensor(hadamard(a), where), "right": Tensor(hadamard(b), where)}
    return Case("Hadamard", {"x": Tensor(x, "fed"), **matrices})


def packed_weights(draw: st.DrawFn, random: np.random.Generator) -> tuple[dict[str, Tensor], dict[str, Any]]:
    rows, columns, bits = draw(sizes), draw(sizes), draw(st.integers(1, 8))
    group = draw(st.sampled_from([16, 32, 64, 128, rows]))
    tiles, units, groups = -(-columns // 16), -(-rows // 16), -(-rows // group)
    dtype = draw(st.sampled_from([np.float32, np.float16]))
    where = draw(st.sampled_from(["graph", "file"]))
    entries = 2**bits
    zero_points = (tiles, groups, 16) if draw(st.booleans()) else (1, 1, 1)
    inputs = {
        "codes": Tensor(random.integers(0, 256, (tiles, units, 32 * bits), np.uint8), where),
        "scales": Tensor(random.uniform(0.1, 1, (tiles, groups, 16)).astype(dtype), where),
        "table": Tensor(np.sort(random.standard_normal(entries)).astype(np.float32), where),
        "zero_points": Tensor((random.standard_normal(zero_points) * (zero_points[0] > 1)).astype(dtype), where),
        "bias": Tensor(random.standard_normal(columns).astype(np.float32), where),
    }
    return inputs, {"rows": rows, "columns": columns, "group": group}


@st.composite
def honest_table(draw: st.DrawFn) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    inputs, attributes = packed_weights(draw, random)
    x = random.standard_normal((*draw(batches()), attributes["rows"])).astype(np.float32)
    attributes["activations"] = draw(st.sampled_from(["float32", "bfloat16", "int8", "int16"]))
    return Case("MatMulTable", {"x": Tensor(x, "fed"), **inputs}, attributes)


@st.composite
def honest_dynamic(draw: st.DrawFn) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    inputs, attributes = packed_weights(draw, random)
    rows = attributes["rows"]
    x = random.standard_normal((*draw(batches()), rows)).astype(np.float32)
    a = draw(st.sampled_from([n for n in (1, 2, 4, 12, 16) if rows % n == 0]))
    b = draw(st.sampled_from([n for n in (1, 2, 4, 8, 20) if rows % (a * n) == 0]))
    matrices = {"left": Tensor(hadamard(a)), "right": Tensor(hadamard(b))}
    attributes |= {"bits": draw(st.sampled_from([8, 4])), "clip": draw(st.sampled_from([1.0, 0.5]))}
    return Case("MatMulDynamic", {"x": Tensor(x, "fed"), **inputs, **matrices}, attributes)


HONEST: dict[str, Callable[[], st.SearchStrategy[Case]]] = {
    "Hadamard": honest_hadamard,
    "MatMulTable": honest_table,
    "MatMulDynamic": honest_dynamic,
}


# What a stranger may do to them. Each of these changes the case in place.


def _any_input(draw: st.DrawFn, case: Case) -> Tensor:
    return case.inputs[draw(st.sampled_from(sorted(case.inputs)))]


def _stored_input(draw: st.DrawFn, case: Case) -> Tensor:
    """Return one that the file holds."""
    tensor = _any_input(draw, case)
    if tensor.where not in ("graph", "file"):
        tensor.where = draw(st.sampled_from(["graph", "file"]))
    return tensor


def another_shape(draw: st.DrawFn, case: Case) -> None:
    tensor = _any_input(draw, case)
    shape = list(tensor.values.shape)
    axis = draw(st.integers(0, len(shape)))
    match draw(st.sampled_from(["add", "remove", "resize", "scalar"])):
        case "add":
            shape.insert(axis, draw(st.integers(0, 2)))
        case "scalar":
            shape = []
        case "remove" if shape:
            shape.pop(axis % len(shape))
        case _ if shape:
            size = shape[axis % len(shape)]
            shape[axis % len(shape)] = draw(st.sampled_from([0, 1, max(0, size - 1), size + 1, 2 * size, 16, 33]))
    tensor.values = np.resize(tensor.values, shape).astype(tensor.values.dtype)


def a_shape_that_lies(draw: st.DrawFn, case: Case) -> None:
    tensor = _stored_input(draw, case)
    shape = list(tensor.values.shape) or [1]
    shape[draw(st.integers(0, len(shape) - 1))] = draw(st.sampled_from([*INTEGERS, 2, 3]))
    tensor.says = shape


def data_that_ends_early(draw: st.DrawFn, case: Case) -> None:
    tensor = _stored_input(draw, case)
    tensor.cut = draw(st.integers(1, max(1, tensor.values.nbytes)))


def external_data_that_lies_anywhere(draw: st.DrawFn, case: Case) -> None:
    for tensor in case.inputs.values():
        if tensor.where == "graph":
            tensor.where, tensor.shift = "file", draw(st.integers(0, 65))


def external_data_beyond_the_file(draw: st.DrawFn, case: Case) -> None:
    tensor = _any_input(draw, case)
    tensor.where = "file"
    if draw(st.booleans()):
        tensor.offset = draw(st.sampled_from([*INTEGERS, 3, 4095, 4096, 4097]))
    else:
        tensor.length = draw(st.sampled_from([*INTEGERS, 3]))


def another_type(draw: st.DrawFn, case: Case) -> None:
    tensor = _any_input(draw, case)
    with np.errstate(invalid="ignore", over="ignore"):
        tensor.values = tensor.values.astype(draw(st.sampled_from(TYPES)))


def another_place(draw: st.DrawFn, case: Case) -> None:
    _any_input(draw, case).where = draw(st.sampled_from(["graph", "file", "fed", "nowhere"]))


def fewer_or_more_inputs(draw: st.DrawFn, case: Case) -> None:
    if draw(st.booleans()):
        case.inputs.popitem()
    else:
        case.inputs["one more"] = Tensor(np.zeros((1, 1), np.float32))


def other_values(draw: st.DrawFn, case: Case) -> None:
    tensor = _any_input(draw, case)
    flat = tensor.values = tensor.values.copy()
    if flat.size:
        at = draw(st.integers(0, flat.size - 1))
        value = draw(st.sampled_from(FLOATS)) if flat.dtype.kind == "f" else draw(st.integers(0, 255))
        with np.errstate(over="ignore"):
            flat.reshape(-1)[at] = np.array(value).astype(flat.dtype)


def a_short_table(draw: st.DrawFn, case: Case) -> None:
    if "table" in case.inputs:
        table = case.inputs["table"]
        table.values = table.values.reshape(-1)[: draw(st.integers(0, 256))]


def matrices_of_any_signs(draw: st.DrawFn, case: Case) -> None:
    for name in ("left", "right"):
        if name in case.inputs:
            order = draw(st.integers(0, 24))
            random = np.random.default_rng(order)
            case.inputs[name].values = random.choice(np.array([1, -1], np.int8), (order, order))


def other_attributes(draw: st.DrawFn, case: Case) -> None:
    if not case.attributes:
        return
    name = draw(st.sampled_from(sorted(case.attributes)))
    match draw(st.sampled_from(["value", "value", "type", "gone"])):
        case "gone":
            del case.attributes[name]
        case "type":
            case.attributes[name] = draw(st.sampled_from([1, 1.0, "int8", [1, 2], [1.5], [], ["a"]]))
        case _ if isinstance(case.attributes[name], int):
            case.attributes[name] = draw(st.sampled_from([*INTEGERS, 48, 112]))
        case _ if isinstance(case.attributes[name], float):
            case.attributes[name] = draw(st.sampled_from(FLOATS))
        case _:
            odd = ["", "int", "int8 ", "int88", "float64", "x" * 16, "x" * 100_000, b"int8\0x", b"\xff\xfe", "%s%n%s"]
            case.attributes[name] = draw(st.sampled_from(odd))


def sizes_that_agree_on_a_lie(draw: st.DrawFn, case: Case) -> None:
    """Attributes so large that products of them are small again in 64 bits."""
    if "rows" in case.attributes:
        case.attributes["rows"] = draw(st.sampled_from(INTEGERS))
        case.attributes["columns"] = draw(st.sampled_from(INTEGERS))
        case.attributes["group"] = draw(st.sampled_from([*INTEGERS, case.attributes["rows"]]))


def another_version(draw: st.DrawFn, case: Case) -> None:
    case.version = draw(st.sampled_from([0, 2, 1000, 2**31 - 1]))


SPOIL = [
    another_shape,
    another_shape,
    a_shape_that_lies,
    data_that_ends_early,
    external_data_that_lies_anywhere,
    external_data_beyond_the_file,
    another_type,
    another_place,
    fewer_or_more_inputs,
    other_values,
    other_values,
    a_short_table,
    matrices_of_any_signs,
    other_attributes,
    other_attributes,
    sizes_that_agree_on_a_lie,
    another_version,
]


@st.composite
def hostile(draw: st.DrawFn, honest: Callable[[], st.SearchStrategy[Case]]) -> Case:
    case = draw(honest())
    for spoil in draw(st.lists(st.sampled_from(SPOIL), max_size=3)):
        if case.inputs:
            spoil(draw, case)
    return case


def has_instructions(isa: str, folder: Path) -> bool:
    one = Tensor(np.ones((1, 1), np.int8))
    file, fed = Case("Hadamard", {"x": Tensor(np.ones(1, np.float32), "fed"), "left": one, "right": one}).model(folder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("GRAPHOPT_OPS_ISA", isa)
        try:
            run(file, fed)
        except Exception:
            return False
    return True


def check(case: Case, folder: Path) -> np.ndarray | None:
    """A kernel's error names the node; a result is the operator's."""
    file, fed = case.model(folder)
    try:
        y = run(file, fed)
    except Exception as error:
        # onnxruntime refuses some by itself, before it asks a kernel, in words of its own
        says = str(error)
    else:
        says = ""
    if says:
        assert "[ONNXRuntimeError]" in says
        assert f"ai.graphopt node '{NODE}'" in says or "ai.graphopt node" not in says
        return None
    arguments = [tensor.said() for tensor in case.inputs.values()]
    with np.errstate(all="ignore"):
        expected = OPERATORS[case.operator].reference(*arguments, **case.attributes)
    assert (y.shape, y.dtype) == (expected.shape, arguments[0].dtype)
    as_given = all(tensor.offset is None for tensor in case.inputs.values())
    if as_given and all(np.isfinite(a).all() and np.abs(a).max(initial=0) < 1e4 for a in arguments):
        # Other tests know how near it must be. Here it is enough that it was computed from these numbers and no others.
        assert np.abs(y - expected).max(initial=0) <= largest(case)
    return y


def largest(case: Case) -> float:
    """A bound on what rounding to few bits moves a result by."""
    x, *others = (tensor.values.astype(np.float64) for tensor in case.inputs.values())
    size = np.abs(x).max(initial=0)
    if case.operator == "Hadamard":
        return 1e-2 * size * np.sqrt(len(others[0]) * len(others[1]))
    _, scales, table, zero_points, _, *matrices = others
    weight = (np.abs(table).max() + np.abs(zero_points).max()) * np.abs(scales).max()
    turned = np.sqrt(np.prod([len(matrix) for matrix in matrices]))
    step = 0.02 if case.operator == "MatMulTable" else 1 - case.attributes["clip"] + 2 / case.attributes["bits"] ** 1.5
    return step * size * turned * weight * x.shape[-1]


@pytest.mark.parametrize("isa", INSTRUCTIONS)
@pytest.mark.parametrize("operator", sorted(HONEST))
def test_an_error_that_names_the_node_or_a_result_that_is_defined(
    operator: str, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_instructions(isa, tmp_path):
        pytest.skip(f"this machine has no {isa}")
    monkeypatch.setenv("GRAPHOPT_OPS_ISA", isa)

    @given(hostile(HONEST[operator]))
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    def no_crash(case: Case) -> None:
        check(case, tmp_path)

    no_crash()


# What only a kernel can see, it reports under the name of the node; each fault by itself.


def weights(rows: int = 40, columns: int = 20, bits: int = 4, group: int = 16, operator: str = "MatMulTable") -> Case:
    random = np.random.default_rng(0)
    tiles, units, groups = -(-columns // 16), -(-rows // 16), -(-rows // group)
    inputs = {
        "x": Tensor(random.standard_normal((3, rows)).astype(np.float32), "fed"),
        "codes": Tensor(random.integers(0, 256, (tiles, units, 32 * bits), np.uint8)),
        "scales": Tensor(np.ones((tiles, groups, 16), np.float32)),
        "table": Tensor(np.arange(2**bits, dtype=np.float32)),
        "zero_points": Tensor(np.zeros((1, 1, 1), np.float32)),
        "bias": Tensor(np.zeros(1, np.float32)),
    }
    attributes: dict[str, Any] = {"rows": rows, "columns": columns, "group": group}
    if operator == "MatMulTable":
        return Case(operator, inputs, attributes | {"activations": "int8"})
    inputs |= {"left": Tensor(hadamard(4)), "right": Tensor(hadamard(2))}
    return Case(operator, inputs, attributes | {"bits": 8, "clip": 1.0})


def of_shape(*shape: int, dtype: type = np.float32, where: str = "graph") -> Tensor:
    return Tensor(np.ones(shape, dtype), where)


@pytest.mark.parametrize("operator", ["MatMulTable", "MatMulDynamic"])
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({"rows": 0}, "rows and columns must be"),
        ({"rows": -40}, "rows and columns must be"),
        ({"columns": 2**63 - 1}, "rows and columns must be"),
        ({"rows": 2**62 + 40, "columns": 4}, "rows and columns must be"),
        ({"rows": 2**31, "columns": 2**31}, "codes must have the shape"),
        ({"rows": 48}, "the last axis of x must have 48"),
        ({"rows": 49}, "codes must have the shape"),
        ({"columns": 33}, "codes must have the shape"),
        ({"group": 0}, "group must be"),
        ({"group": -16}, "group must be"),
        ({"group": 24}, "group must be"),
        ({"group": 2**63 - 16}, "group must be"),
        ({"group": 32}, "scales must have the shape"),
        ({"rows": None}, "rows must be there, and be an integer"),
        ({"columns": 20.0}, "columns must be there, and be an integer"),
        ({"group": "16"}, "group must be there, and be an integer"),
        ({"codes": of_shape(2, 3, dtype=np.uint8)}, "codes must have the shape"),
        ({"codes": of_shape(2, 3, 0, dtype=np.uint8)}, "codes must have the shape"),
        ({"codes": of_shape(2, 3, 288, dtype=np.uint8)}, "codes must have the shape"),
        ({"codes": of_shape(2, 3, 100, dtype=np.uint8)}, "codes must have the shape"),
        ({"codes": of_shape(2, 3, 128, dtype=np.uint8, where="fed")}, "codes must be an initializer"),
        ({"scales": of_shape(2, 3, 16, where="fed")}, "scales must be an initializer"),
        ({"table": of_shape(16, where="fed")}, "table must be an initializer"),
        ({"zero_points": of_shape(1, 1, 1, where="fed")}, "zero_points must be an initializer"),
        ({"bias": of_shape(1, where="fed")}, "bias must be an initializer"),
        ({"scales": of_shape(2, 3)}, "scales must have the shape"),
        ({"scales": of_shape(2, 3, 15)}, "scales must have the shape"),
        ({"zero_points": of_shape(1, 1, 1)}, "zero_points must be"),
        ({"zero_points": of_shape(2, 2, 16)}, "zero_points must be"),
        ({"zero_points": of_shape(0, 1, 1)}, "zero_points must be"),
        ({"bias": of_shape(1)}, "bias must be"),
        ({"bias": of_shape(0)}, "bias must be"),
        ({"bias": of_shape(1, 20)}, "bias must be"),
        ({"table": of_shape(0)}, "table must have from 1 to 16 numbers"),
        ({"table": of_shape(17)}, "table must have from 1 to 16 numbers"),
        ({"table": of_shape(4, 4)}, "table must have from 1 to 16 numbers"),
        ({"table": of_shape(15)}, "a code is 15, in a table of 15 numbers"),
        ({"table": Tensor(np.array([0, np.nan], np.float32))}, "entry 1 of the table is no finite number"),
        ({"table": Tensor(np.array([np.inf], np.float32))}, "entry 0 of the table is no finite number"),
        ({"x": of_shape(where="fed")}, "the last axis of x must have 40 numbers"),
        ({"x": of_shape(40, 3, where="fed")}, "the last axis of x must have 40 numbers"),
        ({"x": of_shape(3, 0, where="fed")}, "the last axis of x must have 40 numbers"),
    ],
)
def test_a_product_names_its_node(operator: str, what: dict[str, Any], says: str, tmp_path: Path) -> None:
    case = weights(operator=operator)
    for name, value in what.items():
        if isinstance(value, Tensor):
            case.inputs[name] = value
        elif value is None:
            del case.attributes[name]
        else:
            case.attributes[name] = value
    file, fed = case.model(tmp_path)
    with pytest.raises(Exception, match=f"node '{NODE}': .*{says}"):
        run(file, fed)


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({"bits": 5}, "bits must be 8 or 4"),
        ({"bits": 2**32 + 8}, "bits must be 8 or 4"),
        ({"bits": None}, "bits must be there"),
        ({"clip": 0.0}, "clip must be above 0"),
        ({"clip": 1.5}, "clip must be above 0"),
        ({"clip": float("nan")}, "clip must be above 0"),
        ({"clip": 1}, "clip must be there, and be a float"),
    ],
)
def test_rounding_by_token_names_its_node(attributes: dict[str, Any], says: str, tmp_path: Path) -> None:
    case = weights(operator="MatMulDynamic")
    case.attributes = {name: value for name, value in (case.attributes | attributes).items() if value is not None}
    file, fed = case.model(tmp_path)
    with pytest.raises(Exception, match=f"node '{NODE}': .*{says}"):
        run(file, fed)


@pytest.mark.parametrize(
    ("matrix", "says"),
    [
        (of_shape(3, 3, dtype=np.int8), "40 rows of the weights are no multiple of 4 x 3"),
        (of_shape(0, 0, dtype=np.int8), "right must be a square matrix"),
        (of_shape(2, 2, 1, dtype=np.int8), "right must be a square matrix"),
        (of_shape(2, 2, dtype=np.int8, where="fed"), "right must be an initializer"),
        (Tensor(np.zeros((2, 2), np.int8)), "right has an entry that is neither 1 nor -1"),
    ],
)
def test_a_rotation_in_front_of_a_product_names_its_node(matrix: Tensor, says: str, tmp_path: Path) -> None:
    case = weights(operator="MatMulDynamic")
    case.inputs["right"] = matrix
    file, fed = case.model(tmp_path)
    with pytest.raises(Exception, match=f"node '{NODE}': .*{says}"):
        run(file, fed)


@pytest.mark.parametrize(
    "activations", ["", "int", "int88", "INT8", "x" * 15, "x" * 16, "x" * 100_000, b"\xff", "%s%n"]
)
def test_activations_of_no_kind_are_an_error(activations: str, tmp_path: Path) -> None:
    case = weights()
    case.attributes["activations"] = activations
    file, fed = case.model(tmp_path)
    with pytest.raises(Exception, match=f"node '{NODE}': .*activations must be"):
        run(file, fed)


@pytest.mark.parametrize("operator", sorted(HONEST))
@pytest.mark.parametrize("start", [0, 1, 2, 4, 13, 60])
def test_external_data_lies_where_whole_numbers_may(operator: str, start: int, tmp_path: Path) -> None:
    if operator == "Hadamard":
        matrices = {"left": Tensor(hadamard(4)), "right": Tensor(hadamard(20))}
        case = Case(operator, {"x": Tensor(np.ones((3, 80), np.float32), "fed"), **matrices})
    else:
        case = weights(operator=operator)
        case.inputs["zero_points"] = of_shape(2, 3, 16)
        case.inputs["bias"] = of_shape(20)
    expected = check(case, tmp_path)
    assert expected is not None
    for tensor in case.inputs.values():
        if tensor.where == "graph":
            tensor.where = "file"
    case.start = start
    if operator == "Hadamard" or start % 4 == 0:
        assert np.array_equal(check(case, tmp_path), expected)
    else:
        file, fed = case.model(tmp_path)
        with pytest.raises(Exception, match=f"node '{NODE}': scales lies at no multiple of 4 bytes"):
            run(file, fed)


@pytest.mark.parametrize(
    "name", ["", "n" * 100_000, "%s%n%s%1000000d", "\u00e4\u4e16\U0001f600" * 100, "n" + "\u4e16" * 100]
)
def test_a_node_may_have_any_name(name: str, tmp_path: Path) -> None:
    file, fed = Case(
        "Hadamard",
        {"x": of_shape(3, where="fed"), "left": of_shape(2, 2, dtype=np.int8), "right": of_shape(1, 1, dtype=np.int8)},
    ).model(tmp_path)
    model = onnx.load(file)
    model.graph.node[0].name = name
    onnx.save(model, file)
    with pytest.raises(Exception, match=re.escape(f"ai.graphopt node '{name[:60]}")):
        run(file, fed)
