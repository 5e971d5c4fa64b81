"""The CUDA operators as onnxruntime sees them, on its CPU provider: the host interpreter runs their kernels."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from graphopt.numerics.rotations import hadamard
from graphopt.ort.session import open_session
from graphopt.runtime_ops import declare, library_path
from graphopt.runtime_ops.hadamard.spec.op import HADAMARD
from graphopt.runtime_ops.library import PATH_VARIABLE
from tests.runtime_ops.cuda import interface

ONE = np.ones((1, 1), np.int8)


def save(folder: Path, dtype: type, rank: int, matrices: tuple[np.ndarray, ...] = ()) -> Path:
    """Save a file of one node, whose matrices are constants where they are given."""
    x = ir.val("x", ir.DataType.from_numpy(np.dtype(dtype)), ir.Shape([f"axis{axis}" for axis in range(rank)]))
    names = ("left", "right")
    values = [ir.val(name, ir.DataType.INT8, None) for name in names]
    if matrices:
        values = [ir.val(n, const_value=ir.tensor(m, name=n)) for n, m in zip(names, matrices, strict=True)]
    node = HADAMARD.node([x, *values], name="a node of mine")
    y = node.outputs[0]
    y.name, y.type, y.shape = "y", x.type, x.shape
    inputs, initializers = ([x], values) if matrices else ([x, *values], [])
    graph = ir.Graph(inputs, [y], nodes=[node], initializers=initializers, opset_imports={"": 23}, name="one")
    model = ir.Model(graph, ir_version=11)
    declare(model)
    ir.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.fixture
def on_device(interpreted_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions take the interpreted library."""
    monkeypatch.setenv(PATH_VARIABLE, str(interpreted_library))


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("pair", [(64, 64), (12, 20), (256, 256)])
def test_hadamard_gives_the_bits_of_the_c_interface(
    interpreted: ctypes.CDLL, tmp_path: Path, dtype: type, constant: bool, pair: tuple[int, int]
) -> None:
    matrices = (hadamard(pair[0]), hadamard(pair[1]))
    x = np.random.default_rng(0).standard_normal((2, 1, pair[0] * pair[1])).astype(dtype)
    session = open_session(save(tmp_path, dtype, 3, matrices if constant else ()), optimized_to=tmp_path / "runs.onnx")
    assert [node.op_type for node in ir.load(tmp_path / "runs.onnx").graph] == ["Hadamard"]
    feeds = {"x": x} if constant else {"x": x, "left": matrices[0], "right": matrices[1]}
    expected = interface.hadamard(interpreted, x, *matrices)
    for _ in range(2):
        assert np.array_equal(session.run(None, feeds)[0], expected)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    ("x", "left", "right", "says"),
    [
        ((), ONE, ONE, "x must have a rank of 1 or more"),
        ((3, 10), hadamard(12), ONE, "the last axis of x is 10, which is no multiple of 12 x 1"),
        ((2, 4), np.ones((2, 4), np.int8), ONE, "left must be a square matrix"),
        ((2, 4), np.ones((0, 0), np.int8), ONE, "left must be a square matrix, of order 1 or more"),
        ((2, 4), ONE, np.array([[1, 1], [1, 0]], np.int8), "right has an entry that is neither 1 nor -1"),
        ((2, 257), ONE, np.eye(257, dtype=np.int8) * 2 - 1, "core is of an order of at most 256 on a GPU"),
    ],
)
def test_what_hadamard_cannot_compute_is_an_error_that_names_the_node(
    tmp_path: Path, x: tuple[int, ...], left: np.ndarray, right: np.ndarray, says: str
) -> None:
    session = open_session(save(tmp_path, np.float32, len(x)))
    with pytest.raises(Exception, match=f"node 'a node of mine': .*{says}"):
        session.run(None, {"x": np.ones(x, np.float32), "left": left, "right": right})


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("shape", [(0,), (0, 96), (2, 0, 96), (3, 0)])
def test_nothing_stays_nothing(tmp_path: Path, shape: tuple[int, ...]) -> None:
    session = open_session(save(tmp_path, np.float32, len(shape)))
    feeds = {"x": np.zeros(shape, np.float32), "left": hadamard(12), "right": hadamard(8)}
    assert session.run(None, feeds)[0].shape == shape


@pytest.fixture
def both() -> Path:
    """The library for GPUs, as it was built with nvcc."""
    return library_path("cuda") or pytest.skip("the library of operators for GPUs is not built: no GPU, or no nvcc")


def test_a_session_on_the_cpu_may_have_the_library_for_gpus(
    both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It registers the CPU's operators too: they run where there is no GPU, and give the same bits."""
    file = save(tmp_path, np.float64, 2)
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 96)), "left": hadamard(12), "right": hadamard(8)}
    expected = open_session(file).run(None, feeds)[0]
    monkeypatch.setenv(PATH_VARIABLE, str(both))
    session = open_session(file, optimized_to=tmp_path / "runs.onnx")
    assert [node.op_type for node in ir.load(tmp_path / "runs.onnx").graph] == ["Hadamard"]
    assert np.array_equal(session.run(None, feeds)[0], expected)


def test_onnxruntime_takes_a_domain_from_one_library_only(both: Path, tmp_path: Path) -> None:
    """Why the library for GPUs registers the CPU's operators too. If this ever fails, two libraries will do."""
    options = onnxruntime.SessionOptions()
    for library in (library_path(), both):
        options.register_custom_ops_library(str(library))
    with pytest.raises(Exception, match="Domain already set in registry"):
        onnxruntime.InferenceSession(str(save(tmp_path, np.float32, 1)), options, providers=["CPUExecutionProvider"])
