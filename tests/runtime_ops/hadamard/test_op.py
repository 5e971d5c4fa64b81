from __future__ import annotations

import json
from importlib.resources import files

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.errors import InputError
from graphopt.numerics.rotations import HadamardRotation, hadamard
from graphopt.runtime_ops import DOMAIN, OPERATORS, declare
from graphopt.runtime_ops.hadamard.spec.op import HADAMARD, reference

TYPES = {np.float16: ir.DataType.FLOAT16, np.float32: ir.DataType.FLOAT, np.float64: ir.DataType.DOUBLE}
# (a, b) and the axes before the last. The reference of a large order takes long, so one rank is enough for it.
CASES = [
    *((pair, leading) for pair in [(8, 8), (12, 8), (1, 12)] for leading in [(), (3,), (2, 3), (2, 1, 3)]),
    ((344, 32), (3,)),
    ((172, 64), (3,)),
]


def model(pair: tuple[int, int], dtype: ir.DataType, rank: int, opset: int = 23) -> ir.Model:
    """A graph of one node, whose x has ``rank`` axes that are not known before run time."""
    type_ = ir.TensorType(dtype)
    x = ir.Value(name="x", type=type_, shape=ir.Shape([f"axis{axis}" for axis in range(rank)]))
    matrices = [ir.val(f"matrix{i}", const_value=ir.tensor(hadamard(n), name=f"matrix{i}")) for i, n in enumerate(pair)]
    node = HADAMARD.node([x, *matrices], name="transform")
    y = node.outputs[0]
    y.name, y.type, y.shape = "y", type_, x.shape
    graph = ir.Graph([x], [y], nodes=[node], initializers=matrices, opset_imports={"": opset}, name="one")
    made = ir.Model(graph, ir_version=11)
    declare(made)
    return made


def session(made: ir.Model) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(ir.to_proto(made).SerializeToString(), options)


def run(x: np.ndarray, pair: tuple[int, int]) -> np.ndarray:
    return session(model(pair, TYPES[x.dtype.type], x.ndim)).run(None, {"x": x})[0]


def normal(shape: tuple[int, ...], dtype: type = np.float64) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("pair", "leading"), CASES)
@pytest.mark.parametrize("runs", [1, 3])
def test_body_is_the_reference(dtype: type, pair: tuple[int, int], leading: tuple[int, ...], runs: int) -> None:
    x = normal((*leading, runs * pair[0] * pair[1]), dtype)
    y = run(x, pair)
    expected = reference(x.astype(np.float64), hadamard(pair[0]), hadamard(pair[1]))
    assert y.dtype == dtype
    assert y.shape == x.shape
    # sums of a and of b terms: their roundings are at most a + b, and of random signs about the root of that
    assert np.abs(y - expected).max() < 4 * np.sqrt(sum(pair)) * np.finfo(dtype).eps * np.abs(expected).max()


@given(st.sampled_from([1, 2, 4, 8, 12, 20]), st.sampled_from([1, 2, 4, 12]), st.integers(1, 3), st.integers(0, 3))
@settings(deadline=None)
def test_reference_is_a_dense_product(a: int, b: int, runs: int, rows: int) -> None:
    x = normal((rows, runs * a * b))
    dense = np.kron(np.eye(runs), np.kron(hadamard(a), hadamard(b))) / np.sqrt(a * b)
    assert np.abs(reference(x, hadamard(a), hadamard(b)) - x @ dense).max(initial=0) < 1e-13


@pytest.mark.parametrize("width", [64, 96, 640, 2880, 5632])
def test_it_is_the_rotation_without_signs(width: int) -> None:
    rotation = HadamardRotation(width, None)
    left, right = rotation.pair
    x = normal((3, width))
    assert np.abs(run(x, (len(left), len(right))) - rotation.apply(x, -1)).max() < 1e-13
    assert np.abs(reference(x, left, right) - rotation.apply(x, -1)).max() < 1e-13


# Worked out by hand from the definition: what a file that is saved today must still mean later.
LEFT = np.array([[1, 1], [-1, 1]], np.int8)  # not symmetric, so that its transpose would show
RIGHT = np.array([[1, 1], [1, -1]], np.int8)


def test_frozen_order_4() -> None:
    # left^T X = [[1, -1], [1, 1]] [[1, 2], [3, 4]] = [[-2, -2], [4, 6]]; times right = [[-4, 0], [10, -2]]; over 2
    x = np.array([[1.0, 2, 3, 4], [0, 0, 0, 0], [2, 0, 0, 0]])
    expected = np.array([[-2.0, 0, 5, -1], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert np.array_equal(reference(x, LEFT, RIGHT), expected)
    made = model((2, 2), ir.DataType.DOUBLE, 2)
    made.graph.initializers["matrix0"].const_value = ir.tensor(LEFT, name="matrix0")
    assert np.abs(session(made).run(None, {"x": x})[0] - expected).max() < 1e-15 * 5


def test_frozen_order_12() -> None:
    x = np.arange(1.0, 13) * np.sqrt(12)
    expected = np.array([-76, -8, 4, -6, 6, 18, 30, 20, 10, 0, 12, 2])
    for y in (reference(x, hadamard(1), hadamard(12)), run(x, (1, 12)), run(x[None], (12, 1))[0]):
        assert np.abs(y - expected).max() < 1e-13


@pytest.mark.parametrize("shape", [(0, 96), (2, 0, 96), (0, 3, 192)])
@pytest.mark.parametrize("dtype", TYPES)
def test_no_rows(shape: tuple[int, ...], dtype: type) -> None:
    y = run(np.zeros(shape, dtype), (12, 8))
    assert (y.shape, y.dtype) == (shape, dtype)
    assert reference(np.zeros(shape, dtype), hadamard(12), hadamard(8)).shape == shape


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 3e38, 1e-45])
@pytest.mark.parametrize("where", [0, 5, 95])
def test_what_is_huge_or_not_finite_stays_in_its_run(bad: float, where: int) -> None:
    x = normal((4, 3, 192), np.float32)
    x[1] = 0
    tame, x[2, 1, where], x[2, 1, where + 96] = x.copy(), bad, 1
    y, expected = run(x, (12, 8)), run(tame, (12, 8))
    assert not y[1].any()
    others = np.ones((4, 3, 192), bool)
    others[2, 1] = False
    assert np.array_equal(y[others], expected[others])
    assert np.isfinite(y[2, 1, 96:]).all()
    assert np.isfinite(y[2, 1, :96]).all() == np.isfinite(bad)
    reference(x, hadamard(12), hadamard(8))  # without a warning


@pytest.mark.parametrize("shape", [(10,), (3, 10), (6, 10), (12, 6), (12, 18), (2, 6), (3, 0)])
def test_a_width_that_is_no_multiple_is_an_error(shape: tuple[int, ...]) -> None:
    # (6, 10) and those after it have a multiple of 12 elements in all, which must not pass for a multiple in each row
    if shape[-1]:
        with pytest.raises(ValueError, match="no multiple of 12 x 1"):
            reference(np.ones(shape), hadamard(12), hadamard(1))
        with pytest.raises(Exception, match="reshape"):
            run(np.ones(shape), (12, 1))
    else:
        assert run(np.ones(shape), (12, 1)).shape == shape


@pytest.mark.parametrize("opset", [23, 24, 25, 26])
def test_the_body_is_standard_onnx(opset: int) -> None:
    made = model((12, 8), ir.DataType.FLOAT, 2, opset)
    onnx.checker.check_model(ir.to_proto(made), full_check=True)
    (function,) = made.functions.values()
    assert {node.domain for node in function} == {""}
    assert function.opset_imports[""] == opset
    x = normal((2, 96), np.float32)
    expected = reference(x.astype(np.float64), hadamard(12), hadamard(8))
    # sums of 12 and of 8 numbers, and a product: a rounding of 2^-24 of all magnitudes at most for each
    limit = 21 * 2.0**-24 * np.abs(x).sum(axis=1, keepdims=True) / np.sqrt(96)
    assert (np.abs(session(made).run(None, {"x": x})[0] - expected) <= limit).all()


def test_what_hangs_on_the_matrices_alone_is_folded(tmp_path: object) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = f"{tmp_path}/optimized.onnx"
    onnxruntime.InferenceSession(
        ir.to_proto(model((12, 8), ir.DataType.FLOAT, 2)).SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
    )
    left = {node.op_type for node in ir.load(f"{tmp_path}/optimized.onnx").graph}
    assert left == {"Shape", "Div", "Concat", "ReduceProd", "Reshape", "MatMul", "Transpose"}


def test_declare_puts_the_body_in_once() -> None:
    made = model((12, 8), ir.DataType.FLOAT, 2)
    declare(made)
    assert [(key[0], key[1]) for key in made.functions] == [(DOMAIN, "Hadamard")]
    assert made.opset_imports[DOMAIN] == HADAMARD.version == 1
    assert OPERATORS["Hadamard"] is HADAMARD


def test_declare_leaves_a_graph_without_our_operators() -> None:
    made = model((12, 8), ir.DataType.FLOAT, 2)
    plain = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="none"), ir_version=11)
    declare(plain)
    assert not plain.functions
    assert DOMAIN not in plain.opset_imports
    assert made.functions


def test_declare_refuses_an_operator_it_does_not_know() -> None:
    made = model((12, 8), ir.DataType.FLOAT, 2)
    made.graph.append(ir.node("Hadamart", [made.graph.outputs[0]], domain=DOMAIN, name="odd"))
    with pytest.raises(InputError, match="no operator Hadamart; it has .*Hadamard.*node=odd"):
        declare(made)


def test_cost() -> None:
    cost = HADAMARD.cost([(3, 5632), (88, 88), (64, 64)])
    assert cost.operations == 2 * 3 * 5632 * (88 + 64)
    assert cost.bytes == 2 * 4 * 3 * 5632 + 88 * 88 + 64 * 64


def test_frozen_vectors_keep_their_meaning() -> None:
    """Never regenerate the file: a change that it does not survive is a new version of the operator.

    The orders are squares and x a multiple of their roots, so that every sum and quotient is an integer.
    """
    file = files("graphopt.runtime_ops").joinpath("hadamard", "vectors", "version1.json")
    for frozen in json.loads(file.read_text()):
        left, right = (np.array(frozen[side], np.int8) for side in ("left", "right"))
        x = np.array(frozen["x"], np.float32)
        assert reference(x, left, right).tolist() == frozen["y"]
        y = run(x, (len(left), len(right)))  # which takes the matrices of graphopt.numerics.rotations
        if np.array_equal(left, hadamard(len(left))) and np.array_equal(right, hadamard(len(right))):
            np.testing.assert_allclose(y, frozen["y"], atol=1e-4 * np.abs(x).max())
