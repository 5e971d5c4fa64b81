from __future__ import annotations

import json
from importlib.resources import files

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.passes.phases import CANONICAL_OPSETS
from graphopt.runtime_ops.matmul_table.spec.activations import round_activations
from graphopt.runtime_ops.round_activations.spec.op import LEVELS, MODES, ROUND_ACTIVATIONS, reference
from tests.runtime_ops.bodies import run_body


def rows(seed: int, width: int, *leading: int) -> np.ndarray:
    """Rows of every size from 1e-20 to 1e20, some with an outlier, one of them zeros."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((*leading, 5, width)) * 10.0 ** random.uniform(-20, 20, (*leading, 5, 1))
    x[..., 1, :] *= np.where(np.arange(width) == 0, 60, 1)
    x[..., 3, :] = 0
    return x.astype(np.float32)


def run(x: np.ndarray, activations: str, group: int = 0, clip: float = 1.0, opset: int = 23) -> np.ndarray:
    return run_body(
        ROUND_ACTIVATIONS.name, [x], {"activations": activations, "group": group, "clip": clip}, opset, x.ndim
    )


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    width=st.integers(1, 70),
    mode=st.sampled_from(MODES),
    group=st.sampled_from([0, 1, 16, 48, 100]),
    clip=st.sampled_from([1.0, 0.9, 0.3]),
)
def test_the_body_is_the_reference_to_the_last_bit(seed: int, width: int, mode: str, group: int, clip: float) -> None:
    x = rows(seed, width, 2)
    # the same float32 operations in the same order
    np.testing.assert_array_equal(run(x, mode, group, clip), reference(x, mode, group, clip))


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), width=st.integers(1, 70), mode=st.sampled_from(list(LEVELS)))
def test_a_number_moves_by_half_a_step_at_most(seed: int, width: int, mode: str) -> None:
    x = rows(seed, width)
    m = np.abs(x).max(axis=-1, keepdims=True)
    if mode == "uint4":
        m = np.maximum(x.max(axis=-1, keepdims=True), 0) - np.minimum(x.min(axis=-1, keepdims=True), 0)
    moved = np.abs(reference(x, mode, 0, 1.0) - x)
    # rows of 1e-30 and less become zeros; float32 itself rounds quotient and product
    assert (moved <= m / LEVELS[mode] / 2 + 2**-22 * m + 1e-30).all()


@pytest.mark.parametrize("mode", ["int8", "int16", "uint4", "bfloat16"])
def test_it_rounds_as_the_packed_product_does(mode: str) -> None:
    x = rows(3, 70)
    # the product multiplies q and s in float64, here that is rounded to float32
    np.testing.assert_array_equal(reference(x, mode, 16, 1.0), round_activations(x, 16, mode).astype(np.float32))


def test_by_hand() -> None:
    x = np.array([[7.0, 0.5, 2.5, -1.75], [0, 0, 0, 0]], np.float32)  # m = L, so steps are 1; 0.5 and 2.5 are ties
    for made in (reference(x, "int4", 0, 1.0), run(x, "int4")):
        assert made.tolist() == [[7, 0, 2, -2], [0, 0, 0, 0]]
    cut = np.array([[14.0, 1.0, -2.0, 3.0]], np.float32)
    assert run(cut, "int4", clip=0.5).tolist() == [[7.0, 1.0, -2.0, 3.0]]
    assert run(x[:1], "bfloat16").tolist() == x[:1].astype(ml_dtypes.bfloat16).astype(np.float32).tolist()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("mode", LEVELS)
def test_what_is_not_finite_is_nan_and_stays_in_its_group(mode: str, bad: float) -> None:
    x = rows(0, 40)
    x[2, 20] = bad
    for made in (reference(x, mode, 16, 1.0), run(x, mode, 16)):
        assert np.isnan(made[2, 20])
        assert np.isfinite(np.delete(made, 2, axis=0)).all()
        assert np.isfinite(made[2, np.r_[:16, 32:40]]).all()


def test_float16_comes_back_as_it_went() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float16)
    made = run(x, "int8")
    assert made.dtype == np.float16
    np.testing.assert_array_equal(made, reference(x, "int8", 0, 1.0))


@pytest.mark.parametrize("opset", CANONICAL_OPSETS)
def test_the_body_runs_in_every_opset_that_passes_take(opset: int) -> None:
    x = rows(0, 40)
    for mode in MODES:
        np.testing.assert_array_equal(run(x, mode, 16, opset=opset), reference(x, mode, 16, 1.0))


def test_an_empty_tensor_stays_empty() -> None:
    assert run(np.zeros((0, 40), np.float32), "int8", 16).shape == (0, 40)


def test_what_there_is_not_is_an_error() -> None:
    x = rows(0, 8)
    with pytest.raises(ValueError, match="not to 'int6'"):
        reference(x, "int6", 0, 1.0)
    with pytest.raises(ValueError, match="-1 numbers"):
        reference(x, "int8", -1, 1.0)
    with pytest.raises(Exception, match="Gather"):
        run(x, "int6")


def test_frozen_vectors_keep_their_meaning() -> None:
    """Never regenerate the file: a change that it does not survive is a new version of the operator."""
    path = files("graphopt.runtime_ops").joinpath("round_activations", "vectors", "version1.json")
    for frozen in json.loads(path.read_text()):
        x, attributes = np.array(frozen["x"], np.float32), frozen["attributes"]
        assert reference(x, **attributes).tolist() == frozen["y"]
        assert run(x, **attributes).tolist() == frozen["y"]


def test_cost() -> None:
    cost = ROUND_ACTIVATIONS.cost([(2, 3, 8)])
    assert (cost.operations, cost.bytes) == (5 * 48, 12 * 48)
