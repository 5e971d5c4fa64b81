from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.numerics.rotations import hadamard
from graphopt.runtime_ops.hadamard.spec.op import reference as turned
from graphopt.runtime_ops.matmul_dynamic.spec.op import reference as dynamic_reference
from graphopt.runtime_ops.matmul_table.spec.activations import MODES
from graphopt.runtime_ops.matmul_table.spec.op import reference
from graphopt.runtime_ops.matmul_table.spec.packing import pack
from tests.runtime_ops.matmul_dynamic.bound import bound as dynamic_bound
from tests.runtime_ops.matmul_table.bound import bound
from tests.runtime_ops.products import Case, case_of, run_body

EACH_MODE = pytest.mark.parametrize("activations", MODES)


def exact(case: Case) -> np.ndarray:
    """The product with x as it is, in float64: its own error, 2^-53, is far below any bound here."""
    return reference(**{**case, "activations": "float32"})


@EACH_MODE
@given(st.integers(1, 60), st.integers(1, 8), st.sampled_from([1e-33, 1e-28, 1.0, 1e4]), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_the_reference_is_within(activations: str, rows: int, bits: int, size: float, seed: int) -> None:
    case = {**case_of(rows, 7, 16, bits, zero_points=True, seed=seed), "activations": activations}
    case["x"] *= np.float32(size)
    case["x"][0, 0] *= 50
    assert (np.abs(reference(**case) - exact(case)) <= bound(**case)).all()


@EACH_MODE
def test_the_body_is_within(activations: str) -> None:
    case = {**case_of(200, 33, 48, 5, leading=(7,), zero_points=True, bias=True), "activations": activations}
    assert (np.abs(run_body("MatMulTable", case) - exact(case)) <= bound(**case)).all()


@pytest.mark.parametrize("activations", ["int8", "int16", "uint4"])
def test_a_table_that_is_rounded_is_within(activations: str) -> None:
    case = {**case_of(64, 33, 32, 6, leading=(7,)), "activations": activations}
    step = np.abs(case["table"]).max() / 32767
    rounded = {**case, "table": (np.rint(case["table"] / step) * step).astype(np.float32)}
    difference = np.abs(reference(**rounded) - exact(case))
    assert (difference <= bound(**case)).all()
    # integers are not rounded, and are not allowed to be
    integers = {**case, "table": np.arange(64, dtype=np.float32)}
    slack = bound(**integers) - bound(**{**integers, "table": np.arange(64, dtype=np.float32) * np.float32(0.1)}) / 0.1
    assert (slack < 0).all()


@pytest.mark.parametrize(("activations", "levels"), [("int8", 127), ("int16", 16256)])
def test_the_worst_x_comes_near(activations: str, levels: int) -> None:
    # 0.5 is rounded down and 1.5 up: each number errs by half a step, all in the direction of its weight
    case = {**case_of(512, 1, 512, 4), "activations": activations}
    weight = reference(**{**case, "x": np.eye(512, dtype=np.float32), "activations": "float32"})[:, 0]
    case["x"] = np.where(weight > 0, 0.5, 1.5).astype(np.float32)[None]
    case["x"][0, 0] = levels
    error = np.abs(reference(**case) - exact(case))[0, 0]
    # what is left is the largest number's own half step, and the parts for float32 and the table
    assert 0.9 * bound(**case)[0, 0] < error <= bound(**case)[0, 0]


@EACH_MODE
def test_nothing_is_promised_beyond_float32(activations: str) -> None:
    case = {**case_of(20, 3, 16, 4), "activations": activations}
    case["x"][0, 3], case["x"][1] = np.nan, 3e38
    limits = bound(**case)
    assert np.isinf(limits[:2]).all()
    assert np.isfinite(limits[2]).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("clip", [1.0, 0.7, 0.1])
@pytest.mark.parametrize("orders", [(1, 1), (4, 4), (12, 8)])
@pytest.mark.parametrize("size", [1.0, 1e-33])
def test_dynamic_is_within(bits: int, clip: float, orders: tuple[int, int], size: float) -> None:
    case = case_of(192, 7, 64, 4, leading=(5,), zero_points=True)
    case["x"] *= np.float32(size)
    case |= {"left": hadamard(orders[0]), "right": hadamard(orders[1])}
    h = turned(case["x"].astype(np.float64), case["left"], case["right"])
    weights = {key: value for key, value in case.items() if key not in ("x", "left", "right")}
    unrounded = h @ reference(x=np.eye(192), **weights, activations="float32")
    limits = dynamic_bound(**case, bits=bits, clip=clip)
    assert (np.abs(dynamic_reference(**case, bits=bits, clip=clip) - unrounded) <= limits).all()
    assert (np.abs(run_body("MatMulDynamic", {**case, "bits": bits, "clip": clip}) - unrounded) <= limits).all()


def test_codes_that_do_not_matter() -> None:
    # padding is not read: whatever stands there, the bound is the same
    case = {**case_of(20, 3, 16, 4), "activations": "int8"}
    full = np.full((32, 16), 15, np.uint8)
    full[:20, :3] = 1
    assert np.array_equal(
        bound(**{**case, "codes": pack(full, 4)}), bound(**{**case, "codes": pack(full[:20, :3].copy(), 4)})
    )
