"""The CUDA kernel of Hadamard against its definition, in the host interpreter and on a GPU."""

from __future__ import annotations

import ctypes
from functools import reduce

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.numerics.rotations import hadamard
from tests.runtime_ops.cuda import interface

# What a run may be off by, in parts of its norm. float32: as the CPU's kernel. float16 and bfloat16: half a unit in the
# last place of the result, and numbers cut to 16 bits before a core, 2^-15 of each.
TOLERANCE = {np.float32: 1e-6, np.float16: 2**-11 + 2**-14, ml_dtypes.bfloat16: 2**-8 + 2**-14}
# Sylvester's alone, in one stage and in many; a core in every place; two cores; cores that come apart; one number.
PAIRS = [(64, 64), (8, 1024), (12, 8), (1, 12), (12, 1), (12, 20), (28, 512), (88, 64), (148, 128), (1, 1), (2, 1)]


# float16 and bfloat16 runs whose product comes first: no core, with each number of columns; a core in one row of tiles,
# in one that is not full, and in many; as many columns as a block can have.
HALVES = [(4, 256), (64, 64), (32, 1024), (12, 64), (28, 512), (44, 128), (172, 64), (12, 1024), (148, 256)]


def check(library: ctypes.CDLL, x: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    y = interface.hadamard(library, x, left, right)
    runs = x.astype(np.float64).reshape(-1, len(left), len(right))
    expected = (left.T.astype(np.float64) @ runs @ right) / np.sqrt(len(left) * len(right))
    apart = np.linalg.norm(y.astype(np.float64).reshape(runs.shape) - expected, axis=(1, 2))
    allowed = TOLERANCE[x.dtype.type] * np.linalg.norm(expected, axis=(1, 2))
    assert (apart <= allowed).all(), (apart / allowed).max()
    return y


def normal(seed: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("pair", PAIRS)
def test_it_is_what_the_operator_means(kernels: ctypes.CDLL, dtype: type, pair: tuple[int, int]) -> None:
    order = pair[0] * pair[1]
    x = normal(order, (3 if order > 4096 else 5 + 8192 // order, order), dtype)
    x[1] = 0
    check(kernels, x, hadamard(pair[0]), hadamard(pair[1]))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("pair", HALVES)
def test_runs_whose_product_comes_first(kernels: ctypes.CDLL, dtype: type, pair: tuple[int, int]) -> None:
    """As few runs as this are cut into rows for several blocks, unless y is x; no cut changes a bit."""
    left, right = (hadamard(n) for n in pair)
    x = normal(pair[0], (2, pair[0] * pair[1]), dtype)
    y = check(kernels, x, left, right)
    if not kernels.on_gpu:
        kernels.graphopt_interpreter_seed(1)
    assert np.array_equal(interface.hadamard(kernels, x, left, right, in_place=True), y)
    assert np.array_equal(interface.hadamard(kernels, x[1:], left, right), y[1:])


@pytest.mark.parametrize("pair", [(4, 256), (12, 64), (20, 64)])
def test_many_small_runs_share_blocks(kernels: ctypes.CDLL, pair: tuple[int, int]) -> None:
    left, right = (hadamard(n) for n in pair)
    x = normal(0, (163, pair[0] * pair[1]), np.float16)
    x[5, 100], x[161, 7] = np.inf, np.nan
    y = interface.hadamard(kernels, x, left, right)
    assert not np.isfinite(y[[5, 161]]).any()
    x[[5, 161]] = 1
    expected = check(kernels, x, left, right)
    y[[5, 161]] = expected[[5, 161]]
    assert np.array_equal(y, expected)
    assert np.array_equal(interface.hadamard(kernels, x[160:], left, right), expected[160:])


@given(st.integers(1, 256), st.integers(6, 8), st.integers(0, 2**32 - 1))
@settings(max_examples=8, deadline=None)
def test_any_core_comes_first(kernels: ctypes.CDLL, order: int, log: int, seed: int) -> None:
    log = min(log, (40448 // order).bit_length() - 1)
    core = np.random.default_rng(seed).choice(np.array([-1, 1], np.int8), (order, order))
    check(kernels, normal(seed, (1, order << log), np.float16), core, hadamard(1 << log))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_any_matrices_of_signs(kernels: ctypes.CDLL, a: int, b: int, runs: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    left, right = (random.choice(np.array([-1, 1], np.int8), (n, n)) for n in (a, b))
    check(kernels, normal(seed, (runs, a * b), np.float32), left, right)


def test_cores_up_to_256(kernels: ctypes.CDLL) -> None:
    random = np.random.default_rng(0)
    for order in (64, 65, 160, 161, 256):
        core = random.choice(np.array([-1, 1], np.int8), (order, order))
        check(kernels, normal(order, (2, 3 * order), np.float32), core, hadamard(1))
    core = random.choice(np.array([-1, 1], np.int8), (257, 257))
    with pytest.raises(RuntimeError, match="core is of an order of at most 256"):
        interface.hadamard(kernels, normal(0, (1, 257), np.float32), core, hadamard(1))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("pair", [(256, 256), (256, 172)])
def test_runs_that_no_shared_memory_holds(kernels: ctypes.CDLL, dtype: type, pair: tuple[int, int]) -> None:
    check(kernels, normal(0, (1, pair[0] * pair[1]), dtype), *(hadamard(n) for n in pair))


@pytest.mark.parametrize("pair", [(64, 64), (88, 64), (12, 20), (256, 256)])
def test_the_order_of_threads_changes_no_bit(kernels: ctypes.CDLL, pair: tuple[int, int]) -> None:
    x = normal(1, (2, pair[0] * pair[1]), np.float32)
    results = []
    for seed in (0, 1, 2):
        if not kernels.on_gpu:
            kernels.graphopt_interpreter_seed(seed)
        results.append(interface.hadamard(kernels, x, *(hadamard(n) for n in pair)))
    assert all(np.array_equal(result, results[0]) for result in results)
    # every run by itself
    assert np.array_equal(interface.hadamard(kernels, x[1:].copy(), *(hadamard(n) for n in pair)), results[0][1:])


@pytest.mark.parametrize("shift", [1, 2, 4, 12])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_tensors_that_lie_anywhere(kernels: ctypes.CDLL, dtype: type, shift: int) -> None:
    x = normal(0, (4, 96), dtype)
    y = check(kernels, x, hadamard(12), hadamard(8))
    assert np.array_equal(y, interface.hadamard(kernels, x, hadamard(12), hadamard(8), shift=shift))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("pair", [(8, 8), (12, 8), (4, 12)])
def test_what_is_not_finite_stays_in_its_run(kernels: ctypes.CDLL, bad: float, pair: tuple[int, int]) -> None:
    order = pair[0] * pair[1]
    left, right = (hadamard(n) for n in pair)
    x = normal(0, (3, 2 * order), np.float32)
    tame = x.copy()
    x[1, 5] = bad
    y, expected = (interface.hadamard(kernels, values, left, right) for values in (x, tame))
    assert not np.isfinite(y[1, :order]).any()
    y[1, :order] = expected[1, :order]
    assert np.array_equal(y, expected)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [3e38, 1e-30])
@pytest.mark.parametrize("pair", [(64, 64), (28, 64)])
def test_large_numbers_do_not_overflow_and_small_ones_do_not_vanish(
    kernels: ctypes.CDLL, size: float, pair: tuple[int, int], dtype: type
) -> None:
    order = pair[0] * pair[1]
    x = np.zeros((2, order), dtype)
    x[0, :9] = size
    x[1] = np.random.default_rng(0).uniform(-1, 1, order) * size / 2**6
    check(kernels, x, *(hadamard(n) for n in pair))


def test_what_it_cannot_do_is_an_error(kernels: ctypes.CDLL) -> None:
    x = normal(0, (2, 8), np.float32)
    with pytest.raises(RuntimeError, match="an entry that is neither 1 nor -1"):
        interface.hadamard(kernels, x, np.array([[1, 1], [1, 0]]), hadamard(1))
    one = interface.Factor(1, 1, 1, 1)
    call = interface.Hadamard(x.ctypes.data, x.ctypes.data, 2, 7, one, one)
    with pytest.raises(RuntimeError, match="float32, float16 and bfloat16"):
        interface.check(kernels.graphopt_cuda_hadamard(ctypes.byref(call), None))
    call.type, call.left.inner = 1, 6
    with pytest.raises(RuntimeError, match=r"a factor must be of orders 2\^i, core and 2\^j"):
        interface.check(kernels.graphopt_cuda_hadamard(ctypes.byref(call), None))
    call.left.inner, call.left.parts[1] = 8, 3
    with pytest.raises(RuntimeError, match="orders of a core's parts must multiply"):
        interface.check(kernels.graphopt_cuda_hadamard(ctypes.byref(call), None))


@pytest.mark.parametrize("orders", [(12, 28), (12, 12), (20, 12, 12), (3, 5, 7, 3, 2), (28, 3), (1, 13)])
def test_a_core_that_is_a_kronecker_product_is_done_part_by_part(kernels: ctypes.CDLL, orders: tuple[int, ...]) -> None:
    """As of 29568 = (12 x 28) (44 x 2), the width of a model of 72 billion parameters."""
    random = np.random.default_rng(0)
    parts = [random.choice(np.array([-1, 1], np.int8), (order, order)) for order in orders]
    core = reduce(np.kron, parts)
    made, _ = interface.factor(kernels, core)
    assert made.core == len(core)
    found = [part for part in made.parts if part]
    assert np.prod(found) == len(core)
    assert max(found) <= max(15, *orders)  # there is room for four parts
    check(kernels, normal(0, (2, 2 * len(core)), np.float32), core, hadamard(2))
