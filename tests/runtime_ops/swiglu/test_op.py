"""Body and kernel against the definition, the definition against frozen vectors, and numbers at the ends."""

from __future__ import annotations

import json
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from graphopt.passes.phases import CANONICAL_OPSETS
from graphopt.runtime_ops.swiglu.spec.op import SWIGLU, reference
from tests.native import needs_library
from tests.runtime_ops.hostile import Case, Tensor
from tests.runtime_ops.states import by_kernel
from tests.runtime_ops.swiglu.honest import honest
from tests.runtime_ops.test_registry import run_body


def check(x: np.ndarray, y: np.ndarray) -> None:
    """A sigmoid off by 2e-7 and two products in float32, rounded once more to the type of x."""
    expected = reference(x).astype(np.float64)
    gate, up = np.abs(np.split(x.astype(np.float64), 2, axis=-1))
    limit = 4 * np.finfo(np.float32).eps * gate * up
    if x.dtype == np.float16:
        limit += np.finfo(np.float16).eps * np.abs(expected) + 2.0**-25
    assert (y.shape, y.dtype) == (expected.shape, x.dtype)
    assert (np.abs(y.astype(np.float64) - expected) <= limit).all()


def case_of(x: np.ndarray) -> Case:
    return Case("SwiGLU", {"x": Tensor(x, "fed")})


@given(honest())
@settings(max_examples=20, deadline=None)
def test_the_body_is_the_reference(case: Case) -> None:
    check(case.inputs["x"].values, run_body(case)[0])


@needs_library
def test_the_kernel_is_the_reference(instructions: str) -> None:
    @given(honest())
    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    def agree(case: Case) -> None:
        check(case.inputs["x"].values, by_kernel(case)[0])

    agree()


@needs_library
def test_many_rows_are_cut_into_tasks() -> None:
    x = np.random.default_rng(0).standard_normal((3, 300, 48)).astype(np.float32)
    check(x, by_kernel(case_of(x))[0])


@pytest.mark.parametrize("run", [run_body, pytest.param(by_kernel, marks=needs_library)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_large_gates_open_and_close_and_what_is_not_finite_is_seen(run: object, dtype: type) -> None:
    gates = np.array([100, -100, 6e4, -6e4, np.inf, -np.inf, np.nan, 1, 1, 1], dtype)
    ups = np.array([2, 2, 0.5, 0.5, 1, 1, 1, np.inf, -np.inf, np.nan], dtype)
    y = run(case_of(np.concatenate([gates, ups])[None]))[0][0]  # type: ignore[operator]
    # a closed gate is exp(-87) at most in a kernel, whose exponential ends there
    np.testing.assert_allclose(y[:4].astype(np.float64), [200, 0, 3e4, 0], rtol=1e-6, atol=1e-30)
    assert not np.isfinite(y[4:]).any()


@pytest.mark.parametrize("opset", CANONICAL_OPSETS)
def test_the_body_runs_in_every_opset_that_passes_take(opset: int) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 10)).astype(np.float32)
    check(x, run_body(case_of(x), opset)[0])


@needs_library
@pytest.mark.parametrize(("shape", "message"), [((2, 5), "5, which has no two halves"), ((), "a rank of 1 or more")])
def test_what_has_no_halves_is_an_error(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(Exception, match=message):
        by_kernel(case_of(np.zeros(shape, np.float32)))
    with pytest.raises(ValueError, match="two halves"):
        reference(np.zeros(shape, np.float32))


def test_vectors_are_what_the_reference_computes() -> None:
    text = (files("graphopt.runtime_ops") / "swiglu" / "vectors" / "version1.json").read_text(encoding="utf-8")
    for vector in json.loads(text):
        y = reference(np.array(vector["x"], np.float32))
        # one unit in the last place: exponentials of other libraries
        np.testing.assert_allclose(y, np.array(vector["y"], np.float32), rtol=1.2e-7)


def test_cost() -> None:
    cost = SWIGLU.cost([(3, 8)])
    # five operations for each of 12 numbers; 24 are read, 12 written
    assert (cost.operations, cost.bytes) == (60, 4 * 36)
