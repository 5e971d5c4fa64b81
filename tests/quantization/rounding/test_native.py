"""The library rounds as NumPy does, bit by bit, for every format and set of instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.errors import InputError
from graphopt.numerics.formats import FORMATS
from graphopt.quantization.rounding import native
from graphopt.quantization.rounding.scales import Scaling, choose, nearest, squared_error
from graphopt.runtime_ops.instructions import ISA_VARIABLE
from tests.native import INSTRUCTIONS, needs_library, skip_without

pytestmark = needs_library


def by_numpy(monkeypatch: pytest.MonkeyPatch, function: Any, *arguments: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(native, "available", lambda: False)
        return function(*arguments)


def weights(seed: int, groups: int, size: int, columns: int) -> np.ndarray:
    """Return groups of any magnitude, some of them zeros, with numbers that lie halfway between values."""
    rng = np.random.default_rng(seed)
    made = rng.normal(0, 1, (groups, size, columns)).astype(np.float32).astype(np.float64)
    made *= 10.0 ** rng.integers(-38, 30, (groups, 1, columns))
    made[rng.random((groups, size, columns)) < 0.1] = 0
    made[:, :, rng.random(columns) < 0.1] = 0
    return made


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@given(
    name=st.sampled_from(sorted(name for name, format in FORMATS.items() if format.levels)),
    seed=st.integers(0, 1000),
    shape=st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 16, 33]), st.sampled_from([1, 3, 129])),
    weighted=st.booleans(),
    kind=st.sampled_from([np.float16, np.float32]),
)
@settings(max_examples=40)
def test_the_library_chooses_what_numpy_chooses(
    instructions: str, name: str, seed: int, shape: tuple[int, int, int], weighted: bool, kind: Any
) -> None:
    groups, table = weights(seed, *shape), FORMATS[name]
    importance = np.random.default_rng(seed).random((shape[0], shape[1], 1)) if weighted else None
    skip_without(instructions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ISA_VARIABLE, instructions)
        found = choose(groups, table, "least_squares", np.dtype(kind), importance)
        expected = by_numpy(patch, choose, groups, table, "least_squares", np.dtype(kind), importance)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("name", sorted(name for name, format in FORMATS.items() if format.levels))
def test_ties_and_their_neighbours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = FORMATS[name]
    points = [*table.levels.halfway, *table.levels.values, 0.0, 1e30, -1e30]
    near = np.concatenate([points, np.nextafter(points, np.inf), np.nextafter(points, -np.inf)])
    groups = near[None, :, None]
    scaling = Scaling(np.ones((1, 1)), np.zeros((1, 1), np.uint8))
    assert np.array_equal(nearest(groups, table, scaling).ravel(), table.encode(near))
    expected = by_numpy(monkeypatch, squared_error, groups[:, :-6], table, scaling)
    assert np.array_equal(squared_error(groups[:, :-6], table, scaling), expected)


def test_instructions_that_are_not_there_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "sse9")
    with pytest.raises(InputError, match="GRAPHOPT_OPS_ISA"):
        choose(weights(0, 1, 16, 2), FORMATS["int4"], "least_squares", np.dtype(np.float16))


def test_a_library_without_the_function_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHOPT_OPS_LIBRARY", "")
    assert not native.available()
