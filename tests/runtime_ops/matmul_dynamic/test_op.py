from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphopt.numerics.rotations import hadamard
from graphopt.runtime_ops import DOMAIN, OPERATORS
from graphopt.runtime_ops.hadamard.spec.op import reference as turned
from graphopt.runtime_ops.matmul_dynamic.spec.op import LEVELS, MATMUL_DYNAMIC, reference
from graphopt.runtime_ops.matmul_table.spec.activations import round_rows
from graphopt.runtime_ops.matmul_table.spec.op import dequantize
from tests.runtime_ops.matmul_table.bound import product_bound
from tests.runtime_ops.products import Case, case_of, model_of, run_body

NAME = MATMUL_DYNAMIC.name
NONE = {"left": hadamard(1), "right": hadamard(1)}
EACH_BITS = pytest.mark.parametrize("bits", LEVELS)
EACH_CLIP = pytest.mark.parametrize("clip", [1.0, 0.6])


def check(case: Case) -> None:
    """Hold the body to the reference: within what float32 sums cost, and codes that a tie may move by 1."""
    y, expected = run_body(NAME, case), reference(**case)
    assert y.shape == expected.shape
    assert y.dtype == np.float32
    inputs = {key: case[key] for key in ("codes", "scales", "zero_points", "rows", "columns", "group")}
    levels = LEVELS[case["bits"]]
    order = len(case["left"]) * len(case["right"])
    h = turned(case["x"].astype(np.float64), case["left"], case["right"])
    m = np.abs(h).max(axis=-1, keepdims=True) * np.float32(case["clip"])
    near_tie = np.zeros(h.shape)
    if order > 1:
        # float32 sums of a and of b terms move h by so much; the reference rounds it to float32 too
        moved = (len(case["left"]) + len(case["right"]) + 8) * 2.0**-24 * np.sqrt(order) * np.abs(h).max(initial=0)
        steps = np.divide(h * levels, m, out=np.zeros_like(h), where=m > 0)
        unsure = np.abs(steps - np.floor(steps) - 0.5) < 2 * levels * moved / np.maximum(m, 1e-30)
        near_tie = np.where(unsure, m / levels, 0.0) + 2 * moved
    rounded = round_rows(h.astype(np.float32), levels, case["clip"])
    limit = product_bound(
        rounded,
        near_tie,
        table=case["table"],
        table_off=np.zeros(len(case["table"])),
        bias=case["bias"],
        levels=0,
        **inputs,
    )
    assert (np.abs(y - expected) <= limit).all()


@EACH_BITS
@EACH_CLIP
@pytest.mark.parametrize("shape", [(16, 16, 16), (37, 50, 16), (45, 3, 45)])
@pytest.mark.parametrize("leading", [(), (2, 3), (2, 0)])
def test_body_is_the_reference_without_a_rotation(
    bits: int, clip: float, shape: tuple[int, int, int], leading: tuple[int, ...]
) -> None:
    case = case_of(*shape, 5, leading=leading, zero_points=True, bias=True, scale_type=np.float16)
    check({**case, **NONE, "bits": bits, "clip": clip})


@EACH_BITS
@EACH_CLIP
@pytest.mark.parametrize("orders", [(4, 4), (12, 8), (1, 12), (4, 1)])
def test_body_is_the_reference_with_a_rotation(bits: int, clip: float, orders: tuple[int, int]) -> None:
    case = case_of(192, 20, 64, 4, leading=(2, 3))
    check({**case, "left": hadamard(orders[0]), "right": hadamard(orders[1]), "bits": bits, "clip": clip})


@pytest.mark.parametrize("weight_bits", range(1, 9))
def test_any_bits_of_weights(weight_bits: int) -> None:
    check({**case_of(32, 20, 16, weight_bits), **NONE, "bits": 8, "clip": 1.0})


@EACH_BITS
def test_by_hand(bits: int) -> None:
    # m = L and a scale of 1; 0.5 and 2.5 are ties; with clip 0.5 all but small numbers are cut off at half of that
    levels = LEVELS[bits]
    case = case_of(4, 4, 4, 1, leading=(2,)) | {**NONE, "bits": bits}
    case |= {"table": np.array([0, 1], np.float32), "scales": np.ones((1, 1, 16), np.float32)}
    case["codes"] = np.zeros((1, 1, 32), np.uint8)
    for k in range(4):  # the unit matrix: position 4 n + k with n = k, one bit each
        case["codes"][0, 0, 5 * k] = 1
    assert np.array_equal(
        dequantize(*(case[key] for key in ("codes", "scales", "table", "zero_points")), 4, 4, 4), np.eye(4)
    )
    case["x"] = np.array([[levels, 0.5, 2.5, -1.75], [0, 0, 0, 0]], np.float32)
    for y in (reference(**case, clip=1.0), run_body(NAME, {**case, "clip": 1.0})):
        assert y.tolist() == [[levels, 0, 2, -2], [0, 0, 0, 0]]
    half = reference(**case, clip=0.5)[0]
    assert half[0] == levels / 2
    assert np.array_equal(half, run_body(NAME, {**case, "clip": 0.5})[0])


@EACH_BITS
@EACH_CLIP
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("order", [1, 4])
def test_what_is_not_finite_makes_its_row_nan(bits: int, clip: float, bad: float, order: int) -> None:
    case = case_of(32, 5, 16, 4) | {"left": hadamard(order), "right": hadamard(1), "bits": bits, "clip": clip}
    case["x"][1, 20] = bad
    for y in (run_body(NAME, case), reference(**case)):
        assert np.isnan(y[1]).all()
        assert np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-31, 1e-29, 1e30])
def test_huge_and_tiny(size: float) -> None:
    case = case_of(37, 5, 16, 4)
    case["x"] *= np.float32(size)
    check({**case, **NONE, "bits": 8, "clip": 1.0})


def test_unknown_bits_are_an_error() -> None:
    case = {**case_of(32, 5, 16, 4), **NONE, "bits": 5, "clip": 1.0}
    with pytest.raises(ValueError, match="8 or 4 bits, not 5"):
        reference(**case)
    with pytest.raises(Exception, match="Gather"):
        run_body(NAME, case)


@pytest.mark.parametrize("opset", [23, 24, 25, 26])
def test_the_body_calls_the_others_which_are_declared(opset: int) -> None:
    case = {**case_of(32, 5, 16, 4), "left": hadamard(4), "right": hadamard(4), "bits": 8, "clip": 1.0}
    made = model_of(NAME, case, opset)
    onnx.checker.check_model(ir.to_proto(made), full_check=True)
    assert {key[:2] for key in made.functions} == {(DOMAIN, name) for name in (NAME, "Hadamard", "MatMulTable")}
    assert run_body(NAME, case, opset).shape == (3, 5)


def test_what_hangs_on_constants_is_folded(tmp_path: Path) -> None:
    case = {**case_of(32, 5, 16, 4), **NONE, "bits": 8, "clip": 1.0}
    run_body(NAME, case, optimized=f"{tmp_path}/optimized.onnx")
    left = [node.op_type for node in ir.load(tmp_path / "optimized.onnx").graph]
    assert left[-2:] == ["MatMul", "Cast"]  # of an output of the graph to its own type; elsewhere that goes, too
    assert not {"If", "Gather", "BitShift", "Equal", "Transpose"} & set(left)


def test_cost_and_registration() -> None:
    case = case_of(64, 40, 32, 6, leading=(2, 3))
    shapes = [case[name].shape for name in ("x", "codes", "scales", "table", "zero_points", "bias")]
    product = OPERATORS["MatMulTable"].cost(shapes)
    assert MATMUL_DYNAMIC.cost([*shapes, (1, 1), (1, 1)]).operations == product.operations
    cost = MATMUL_DYNAMIC.cost([*shapes, (4, 4), (8, 8)])
    assert cost.operations == product.operations + 2 * 6 * 64 * 12
    assert cost.bytes == product.bytes + 16 + 64
    assert OPERATORS[NAME] is MATMUL_DYNAMIC
