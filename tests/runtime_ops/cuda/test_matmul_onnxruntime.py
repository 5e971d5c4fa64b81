"""MatMulTable and MatMulDynamic for GPUs as onnxruntime sees them: the host interpreter runs their kernels."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.numerics.rotations import hadamard
from graphopt.ort.session import open_session
from graphopt.runtime_ops.library import PATH_VARIABLE
from tests.runtime_ops.cuda.products import Products
from tests.runtime_ops.matmul_table.test_kernels import WRONG, WRONG_TRELLISES
from tests.runtime_ops.products import Case, case_of, model_of, trellis_case


@pytest.fixture(autouse=True)
def on_device(interpreted_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions take the interpreted library."""
    monkeypatch.setenv(PATH_VARIABLE, str(interpreted_library))


def session_of(folder: Path, name: str, case: Case) -> Any:
    model = model_of(name, case)
    for value in (model.graph.inputs[0], model.graph.outputs[0]):
        value.type = ir.TensorType(ir.DataType.from_numpy(case["x"].dtype))
    ir.save(model, folder / "model.onnx")
    session = open_session(folder / "model.onnx", optimized_to=folder / "runs.onnx")
    assert [node.op_type for node in ir.load(folder / "runs.onnx").graph] == [name]
    return session


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("scale_type", [np.float32, np.float16])
@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_matmul_table_gives_the_bits_of_the_c_interface(
    interpreted: ctypes.CDLL, tmp_path: Path, dtype: type, scale_type: type, activations: str
) -> None:
    case = case_of(100, 37, 48, 6, leading=(2, 3), zero_points=True, bias=True, scale_type=scale_type)
    case |= {"x": case["x"].astype(dtype), "activations": activations}
    session, expected = session_of(tmp_path, "MatMulTable", case), Products(interpreted).table(case)
    for _ in range(2):
        assert np.array_equal(session.run(None, {"x": case["x"]})[0], expected)
    assert session.run(None, {"x": case["x"][:, :0]})[0].shape == (2, 0, 37)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("orders", [(1, 1), (12, 8)])
def test_matmul_dynamic_gives_the_bits_of_the_c_interface(
    interpreted: ctypes.CDLL, tmp_path: Path, dtype: type, orders: tuple[int, int]
) -> None:
    case = {**case_of(96, 40, 48, 4), "bits": 4, "clip": 0.9}
    case |= {side: hadamard(order) for side, order in zip(("left", "right"), orders, strict=True)}
    case["x"] = case["x"].astype(dtype)
    session, expected = session_of(tmp_path, "MatMulDynamic", case), Products(interpreted).dynamic(case)
    assert np.array_equal(session.run(None, {"x": case["x"]})[0], expected)
    assert session.run(None, {"x": case["x"][:0]})[0].shape == (0, 40)


@pytest.mark.parametrize("bits", [3, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_trellises_give_the_bits_of_the_c_interface(
    interpreted: ctypes.CDLL, tmp_path: Path, bits: int, dtype: type
) -> None:
    case = {**trellis_case(128, 40, 128, bits, leading=(2, 3), bias=True), "activations": "float32"}
    case["x"] = case["x"].astype(dtype)
    session, expected = session_of(tmp_path, "MatMulTable", case), Products(interpreted).table(case)
    assert np.array_equal(session.run(None, {"x": case["x"]})[0], expected)
    rotated = {key: value for key, value in case.items() if key != "activations"} | {"bits": 8, "clip": 0.9}
    rotated |= {side: hadamard(order) for side, order in (("left", 4), ("right", 8))}
    session, expected = session_of(tmp_path, "MatMulDynamic", rotated), Products(interpreted).dynamic(rotated)
    assert np.array_equal(session.run(None, {"x": case["x"]})[0], expected)


@pytest.mark.parametrize("what", WRONG_TRELLISES)
def test_what_a_file_lies_about_a_trellis_is_the_error_that_the_cpu_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    changes, message = WRONG_TRELLISES[what]
    case = {**trellis_case(64, 32, 32, 3), "activations": "int8", **changes}
    monkeypatch.setattr("tests.runtime_ops.products.declare", lambda model: None)
    with pytest.raises(Exception, match=f"ai.graphopt node 'product': {message}"):
        session_of(tmp_path, "MatMulTable", case)


@pytest.mark.parametrize("what", WRONG)
def test_what_a_file_lies_about_is_the_error_that_the_cpu_gives(tmp_path: Path, what: str) -> None:
    changes, message = WRONG[what]
    case = {**case_of(64, 32, 32, 4), "activations": "int8", **changes}
    with pytest.raises(Exception, match=f"ai.graphopt node 'product': {message}"):
        session_of(tmp_path, "MatMulTable", case)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "bits must be 8 or 4, not 3"),
        ({"clip": 1.5}, "clip must be above 0 and at most 1, it is 1.5"),
        ({"left": hadamard(12)}, "the 64 rows of the weights are no multiple of 12 x 1"),
        ({"left": np.zeros((2, 2), np.int8)}, "left has an entry that is neither 1 nor -1"),
    ],
)
def test_a_rounding_or_rotation_that_cannot_be_is_an_error(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    one = np.ones((1, 1), np.int8)
    case = {**case_of(64, 32, 32, 4), "bits": 8, "clip": 1.0, "left": one, "right": one, **changes}
    with pytest.raises(Exception, match=f"ai.graphopt node 'product': {message}"):
        session_of(tmp_path, "MatMulDynamic", case)


def test_an_x_of_another_width_is_an_error_that_names_the_node(tmp_path: Path) -> None:
    case = {**case_of(64, 32, 32, 4), "activations": "int8"}
    model = model_of("MatMulTable", case)
    model.graph.inputs[0].shape = ir.Shape(["rows", "width"])
    ir.save(model, tmp_path / "model.onnx")
    session = open_session(tmp_path / "model.onnx")
    with pytest.raises(Exception, match="'product': the last axis of x must have 64 numbers"):
        session.run(None, {"x": np.ones((2, 65), np.float32)})
