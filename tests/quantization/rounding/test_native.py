"""The library rounds as NumPy does, bit by bit, for every format and set of instructions."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.errors import InputError
from graphopt.numerics.formats import FORMATS
from graphopt.numerics.formats.trellis import TrellisFormat
from graphopt.quantization.rounding import native
from graphopt.quantization.rounding.methods import METHODS
from graphopt.quantization.rounding.scale_search import Search
from graphopt.quantization.rounding.scales import Scaling, choose, nearest, squared_error
from graphopt.runtime_ops.instructions import ISA_VARIABLE
from tests.native import EMULATOR_VARIABLE, INSTRUCTIONS, needs_library, skip_without

pytestmark = needs_library


def by_numpy(monkeypatch: pytest.MonkeyPatch, function: Any, *arguments: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(native, "available", lambda: False)
        return function(*arguments)


def weights(seed: int, groups: int, size: int, columns: int) -> np.ndarray:
    """Return groups of any magnitude, some of them zeros, with numbers that lie halfway between values."""
    rng = np.random.default_rng(seed)
    numbers = rng.normal(0, 1, (groups, size, columns)).astype(np.float32).astype(np.float64)
    numbers *= 10.0 ** rng.integers(-38, 30, (groups, 1, columns))
    numbers[rng.random((groups, size, columns)) < 0.1] = 0
    numbers[:, :, rng.random(columns) < 0.1] = 0
    return numbers


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@given(
    name=st.sampled_from(sorted(name for name, format in FORMATS.items() if format.levels)),
    seed=st.integers(0, 1000),
    shape=st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 16, 33]), st.sampled_from([1, 3, 129])),
    is_weighted=st.booleans(),
    kind=st.sampled_from([np.float16, np.float32]),
)
@settings(max_examples=40)
def test_the_library_chooses_what_numpy_chooses(
    instructions: str, name: str, seed: int, shape: tuple[int, int, int], is_weighted: bool, kind: Any
) -> None:
    groups, table = weights(seed, *shape), FORMATS[name]
    importance = np.random.default_rng(seed).random((shape[0], shape[1], 1)) if is_weighted else None
    skip_without(instructions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ISA_VARIABLE, instructions)
        result = choose(groups, table, "least_squares", np.dtype(kind), importance)
        expected = by_numpy(patch, choose, groups, table, "least_squares", np.dtype(kind), importance)
    for left, right in zip(result, expected, strict=True):
        assert np.array_equal(left, right)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@given(
    name=st.sampled_from(sorted(format.name for format in FORMATS.values() if isinstance(format, TrellisFormat))),
    seed=st.integers(0, 1000),
    shape=st.tuples(st.integers(1, 2), st.sampled_from([1, 5]), st.sampled_from([1, 3, 15, 16, 33])),
    is_weighted=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_the_library_finds_the_paths_that_numpy_finds(
    instructions: str, name: str, seed: int, shape: tuple[int, int, int], is_weighted: bool
) -> None:
    groups, format, random = weights(seed, *shape), FORMATS[name], np.random.default_rng(seed)
    importance = random.random((*shape[:2], 1)) if is_weighted else None
    # scales of any size, some far too small for the numbers of their column
    scales = np.maximum(np.abs(groups).max(1), 1e-38) * random.uniform(0.05, 1, (shape[0], shape[2]))
    scales = scales.astype(np.float32).astype(np.float64)
    # numbers that float32 has room for with their squares, and scales that belong to them
    sizes = np.maximum(np.abs(groups).max(1, keepdims=True), 1e-38)
    numbers, steps = (groups / sizes).astype(np.float32), (scales / sizes[:, 0]).astype(np.float32)
    counts = None if importance is None else importance.astype(np.float32)
    skip_without(instructions)
    if EMULATOR_VARIABLE in os.environ:
        pytest.skip("the bridge to emulated kernels has no search of paths")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ISA_VARIABLE, instructions)
        assert native.searches(format)
        codes = native.encode(groups, format, scales, None, importance)
        sums = native.try_scales(numbers, format, steps, counts)
    np.testing.assert_array_equal(codes, format.encode(groups, scales[:, None], None, importance))
    values = format.approximate(numbers / steps[:, None], steps[:, None])
    weighted_values = values if counts is None else counts * values
    squared_errors = np.square(values * steps[:, None] - numbers) * (1 if counts is None else counts)
    for row_sums, rows in zip(sums, (squared_errors, weighted_values * numbers, weighted_values * values), strict=True):
        np.testing.assert_array_equal(row_sums, np.add.accumulate(rows, 1)[:, -1])


@pytest.mark.parametrize("columns", [1, 40])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_scales_of_paths_are_those_of_numpy(monkeypatch: pytest.MonkeyPatch, columns: int, is_weighted: bool) -> None:
    groups = weights(2, 2, 19, columns)
    importance = np.random.default_rng(3).random((2, 19, 1)) if is_weighted else None
    arguments = groups, FORMATS["t3"], "least_squares", np.dtype(np.float16), importance
    if EMULATOR_VARIABLE in os.environ:
        pytest.skip("the bridge to emulated kernels has no search of paths")
    assert native.tries_scales(FORMATS["t3"])
    result, expected = Search().scaling(*arguments), by_numpy(monkeypatch, Search().scaling, *arguments)
    np.testing.assert_array_equal(result.scales, expected.scales)


def test_a_trellis_of_any_window_is_searched() -> None:
    # no kernel is compiled for its bits, loops know them at run time; and its values are no steps of 1/32
    random = np.random.default_rng(0)
    tables = [tuple(map(float, 2 * random.standard_normal(32))) for _ in range(2)]
    format = TrellisFormat("t3", 3, *tables)
    groups, scales = random.standard_normal((2, 3, 20)), np.ones((2, 20))
    np.testing.assert_array_equal(native.encode(groups, format, scales), format.encode(groups))


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("name", ["t2", "t3", "t4", "t5"])
def test_rows_make_up_for_errors_as_in_numpy(instructions: str, name: str) -> None:
    random = np.random.default_rng(1)
    inputs, matrix = random.standard_normal((60, 40)), random.standard_normal((40, 37)).astype(np.float32)
    skip_without(instructions)
    if EMULATOR_VARIABLE in os.environ:
        pytest.skip("the bridge to emulated kernels has no search of paths")

    def codes_of_rows() -> np.ndarray:
        method = METHODS["gptq"]()
        quantization = method.round(
            matrix, FORMATS[name], 16, "least_squares", scale_type=np.float16, statistics=inputs.T @ inputs
        )
        return np.asarray(quantization.codes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ISA_VARIABLE, instructions)
        assert native.feeds_back(FORMATS[name])
        codes = codes_of_rows()
        np.testing.assert_array_equal(codes, by_numpy(patch, codes_of_rows))


def test_any_number_of_threads_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    matrix = random.standard_normal((32, 1040)).astype(np.float32)
    hessian = np.diag(random.random(32))
    for method in METHODS.values():
        codes = []
        for threads in ("1", "3"):
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
            quantization = method().round(
                matrix, FORMATS["t2"], 16, "least_squares", scale_type=np.float16, statistics=hessian
            )
            codes.append(quantization.codes)
        np.testing.assert_array_equal(*codes)


@pytest.mark.parametrize("name", sorted(name for name, format in FORMATS.items() if format.levels))
def test_ties_and_their_neighbours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = FORMATS[name]
    points = [*table.levels.halfway, *table.levels.values, 0.0, 1e30, -1e30]
    neighbours = np.concatenate([points, np.nextafter(points, np.inf), np.nextafter(points, -np.inf)])
    groups = neighbours[None, :, None]
    scaling = Scaling(np.ones((1, 1)), np.zeros((1, 1), np.uint8))
    assert np.array_equal(nearest(groups, table, scaling).ravel(), table.encode(neighbours))
    expected = by_numpy(monkeypatch, squared_error, groups[:, :-6], table, scaling)
    assert np.array_equal(squared_error(groups[:, :-6], table, scaling), expected)


def test_instructions_that_are_not_there_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "sse9")
    with pytest.raises(InputError, match="GRAPHOPT_OPS_ISA"):
        choose(weights(0, 1, 16, 2), FORMATS["int4"], "least_squares", np.dtype(np.float16))


def test_a_library_without_the_function_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHOPT_OPS_LIBRARY", "")
    assert not native.available()
