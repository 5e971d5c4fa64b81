"""MatMulDynamic's CUDA kernels, run by the host interpreter and by a GPU where there is one."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from graphopt.numerics.formats import FORMATS
from graphopt.numerics.rotations import hadamard
from graphopt.runtime_ops.matmul_dynamic.spec.op import reference
from tests.pairwise import pairwise
from tests.runtime_ops.cuda.products import Products
from tests.runtime_ops.matmul_dynamic.bound import bound
from tests.runtime_ops.matmul_table.test_vectors import inputs_of, load
from tests.runtime_ops.products import case_of

# half a unit in the last place of y, as a share of it
HALF_UNIT = {np.float32: 0.0, np.float16: 2.0**-11, ml_dtypes.bfloat16: 2.0**-8}


@pytest.fixture(scope="module")
def products(kernels: ctypes.CDLL) -> Products:
    return Products(kernels)


@pytest.mark.parametrize("frozen", load("matmul_dynamic"), ids=lambda frozen: f"{frozen['activation_bits']} bits")
def test_frozen_vectors(products: Products, frozen: dict) -> None:
    case, _ = inputs_of(frozen)
    left, right = (np.array(frozen[side], np.int8) for side in ("left", "right"))
    Q = np.kron(np.eye(case["rows"] // 4), np.kron(left, right)) / 2
    levels = 2 ** (frozen["activation_bits"] - 1) - 1
    h = np.clip(case["x"], -levels, levels) * [[1], [2], [4]]
    case |= {"x": (h @ Q.T).astype(np.float32), "left": left, "right": right, "bits": frozen["activation_bits"]}
    assert products.dynamic({**case, "clip": 1.0}).tolist() == frozen["y"]


@pytest.mark.parametrize(
    ("orders", "name", "clip", "bits", "dtype"),
    pairwise([(1, 1), (12, 8), (8, 4)], ["int4", "int8", "fp6-e2m3", "fp6-e3m2"], [0.8, 1.0], [8, 4], [*HALF_UNIT]),
)
def test_it_is_within_the_bound(
    products: Products, orders: tuple[int, int], name: str, clip: float, bits: int, dtype: type
) -> None:
    """Few rows and tiles; x as a GPU has it, and everything behind it in float32."""
    left, right = (hadamard(order) for order in orders)
    for count in (3, 18):
        case = {**case_of(192, 40, 96, FORMATS[name].bits, leading=(count,)), "left": left, "right": right}
        case |= {"bits": bits, "clip": clip, "table": np.array(FORMATS[name].table, np.float32)}
        case["x"] = case["x"].astype(dtype)
        ys = [products.dynamic(case, seed) for seed in range(2)]
        assert ys[0].tobytes() == ys[1].tobytes()
        wide = {**case, "x": case["x"].astype(np.float32)}
        expected, limit = reference(**wide), bound(**wide)
        # both are within the bound of the exact product, so of each other within twice that
        limit = 2 * limit + HALF_UNIT[dtype] * (np.abs(expected) + 2 * limit)
        assert (np.abs(ys[0].astype(np.float64) - expected) <= limit).all()


def test_a_matrix_of_minus_one_turns_signs(products: Products) -> None:
    case = {**case_of(64, 32, 64, 4, leading=(2,)), "bits": 8, "clip": 1.0}
    case |= {"table": np.array(FORMATS["int4"].table, np.float32), "right": np.ones((1, 1), np.int8)}
    plain = products.dynamic({**case, "left": np.ones((1, 1), np.int8)})
    assert np.array_equal(products.dynamic({**case, "left": -np.ones((1, 1), np.int8)}), -plain)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("count", [2, 20])
def test_what_is_not_finite_stays_in_its_row(products: Products, bad: float, count: int) -> None:
    case = {**case_of(64, 32, 32, 4, leading=(count,)), "bits": 4, "clip": 0.9}
    case |= {"left": hadamard(4), "right": hadamard(4)}
    case["x"][1, 40] = bad
    y = products.dynamic(case)
    assert np.isnan(y[1]).all()
    assert np.isfinite(np.delete(y, 1, axis=0)).all()


@pytest.mark.parametrize("count", [0, 1])
def test_no_rows_and_rows_of_zeros(products: Products, count: int) -> None:
    case = {
        **case_of(64, 32, 32, 4, leading=(count,)),
        "bits": 8,
        "clip": 1.0,
        "left": hadamard(4),
        "right": hadamard(4),
    }
    case["x"][...] = 0
    assert np.array_equal(products.dynamic(case), np.zeros((count, 32)))
