from __future__ import annotations

import json
from importlib.resources import files

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.ort.session import session_of
from graphopt.passes.phases import CANONICAL_OPSETS
from graphopt.runtime_ops import OPERATORS, declare

ROUND_TRIP = OPERATORS["RoundTrip"]
ROUNDING = 4 * float(np.finfo(np.float32).eps)  # four float32 operations stand between x and y


def run(
    x: np.ndarray, bits: int = 4, symmetric: int = 1, clip: float = 1.0, *, opset: int = 23, trips: int = 1
) -> np.ndarray:
    """Run the body in onnxruntime, as a node that no library knows; ``trips`` nodes, one behind the other."""
    given = ir.val("x", ir.DataType.from_numpy(x.dtype), ir.Shape(["rows"] * (x.ndim - 1) + ["row"]))
    value, nodes = given, []
    for number in range(trips):
        node = ROUND_TRIP.node([value], {"bits": bits, "symmetric": symmetric, "clip": clip}, name=f"trip{number}")
        value = node.outputs[0]
        value.name, value.type, value.shape = f"y{number}", given.type, given.shape
        nodes.append(node)
    graph = ir.Graph([given], [value], nodes=nodes, opset_imports={"": opset}, name="trip")
    model = ir.Model(graph, ir_version=10)
    declare(model)
    with session_of(model) as session:
        return session.run(None, {"x": x})[0]


def by_definition(row: np.ndarray, bits: int, symmetric: bool) -> tuple[np.ndarray, float]:
    """Return the nearest of all values of codes, found by trying each, and the scale."""
    row = row.astype(np.float64)
    if symmetric:
        largest = 2 ** (bits - 1) - 1
        scale, offset, codes = np.abs(row).max() / largest, 0.0, np.arange(-largest, largest + 1)
    else:
        scale, offset, codes = np.ptp(row) / (2**bits - 1), row.min(), np.arange(2**bits)
    levels = codes * scale + offset
    return levels[np.abs(row[:, None] - levels).argmin(axis=1)], float(scale)


def rows(seed: int, width: int) -> np.ndarray:
    """Rows of every size from 1e-20 to 1e20, some with an outlier, some far from zero, one of them zeros."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((9, width)) * 10.0 ** random.uniform(-20, 20, (9, 1))
    x[1] *= np.where(np.arange(width) == 0, 60, 1)
    x[2] = x[2] + 10 * np.abs(x[2]).max()
    x[3] = 0
    return x.astype(np.float32)


CASES = {
    "seed": st.integers(0, 10_000),
    "width": st.integers(1, 40),
    "bits": st.sampled_from([2, 4, 8]),
    "symmetric": st.booleans(),
}


@given(**CASES)
@settings(max_examples=25)
def test_every_number_becomes_the_nearest_that_a_code_stands_for(
    seed: int, width: int, bits: int, symmetric: bool
) -> None:
    x = rows(seed, width)
    y = run(x, bits, int(symmetric))
    for before, after in zip(x, y, strict=True):
        nearest, scale = by_definition(before, bits, symmetric)
        rounding = ROUNDING * np.abs(before).max()
        assert np.abs(before - after).max() <= scale / 2 + rounding
        # on a tie the two levels beside it are equally near, and float32 may see a tie where float64 sees none
        clear = np.abs(np.abs(before - nearest) - scale / 2) > rounding
        assert np.abs(after - nearest)[clear].max(initial=0.0) <= rounding


@given(**CASES, clip=st.floats(0.3, 1.0))
@settings(max_examples=25)
def test_the_body_computes_what_the_reference_does(
    seed: int, width: int, bits: int, symmetric: bool, clip: float
) -> None:
    x = rows(seed, width)
    # the same float32 operations in the same order
    np.testing.assert_array_equal(
        run(x, bits, int(symmetric), clip), ROUND_TRIP.reference(x, bits, int(symmetric), clip)
    )


@given(**CASES)
@settings(max_examples=15)
def test_a_second_trip_changes_nothing(seed: int, width: int, bits: int, symmetric: bool) -> None:
    x = rows(seed, width)
    once, twice = (run(x, bits, int(symmetric), trips=trips) for trips in (1, 2))
    assert (np.abs(once - twice) <= ROUNDING * np.abs(x).max(axis=-1, keepdims=True)).all()


@pytest.mark.parametrize("symmetric", [0, 1])
@pytest.mark.parametrize("clip", [1.0, 0.5])
def test_a_row_without_a_scale_comes_back_and_an_empty_tensor_stays_empty(symmetric: int, clip: float) -> None:
    zeros = np.zeros((2, 5), np.float32)
    assert np.array_equal(run(zeros, 4, symmetric, clip), zeros)
    assert run(np.zeros((0, 5), np.float32), 4, symmetric, clip).shape == (0, 5)
    if not symmetric:
        assert np.array_equal(run(zeros + np.float32(0.3), 4, 0, clip), zeros + np.float32(0.3))


def test_zero_stays_zero_and_signs_mirror_where_it_is_symmetric() -> None:
    x = np.array([[0.0, 1.0, -3.0, 0.1, 7.0]], np.float32)
    assert run(x).tolist() == [[0.0, 1.0, -3.0, 0.0, 7.0]]
    assert np.array_equal(run(-x), -run(x))


def test_a_clip_cuts_off_the_largest_and_gives_the_others_a_finer_scale() -> None:
    x = np.array([[14.0, 1.0, -2.0, 3.0]], np.float32)
    assert run(x).tolist() == [[14.0, 0.0, -2.0, 4.0]]  # scale 2: 1 and 3 are ties, which go to the even codes
    assert run(x, clip=0.5).tolist() == [[7.0, 1.0, -2.0, 3.0]]  # scale 1
    # from 0 to 15: a fifth is cut off, a half of it on each side, which leaves 1.5 to 13.5 in steps of 0.8
    asymmetric = run(np.array([[0.0, 15.0, 1.6, 13.4]], np.float32), 4, 0, 0.8)
    np.testing.assert_allclose(asymmetric, [[1.5, 13.5, 1.5, 13.5]], rtol=1e-6)


def test_what_is_no_number_is_not_hidden() -> None:
    x = np.array([[1.0, np.nan, 2.0], [1.0, np.inf, 2.0]], np.float32)
    for symmetric in (0, 1):
        y = run(x, 4, symmetric)
        assert np.isnan(y[0, 1])
        assert np.isnan(y[1]).any()


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_types_come_back_as_they_went(dtype: type[np.floating]) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(dtype)
    y = run(x)
    assert y.dtype == dtype
    assert np.array_equal(y, ROUND_TRIP.reference(x, 4, 1, 1.0))


@pytest.mark.parametrize("opset", CANONICAL_OPSETS)
def test_the_body_runs_in_every_opset_that_passes_take(opset: int) -> None:
    x = rows(0, 8)
    assert np.array_equal(run(x, opset=opset), run(x))


def test_frozen_vectors_keep_their_meaning() -> None:
    """Never regenerate the file: a change that it does not survive is a new version of the operator.

    Scales of rows that are not flat are 1/2, so their numbers are exact.
    """
    file = files("graphopt.runtime_ops").joinpath("round_trip", "vectors", "version1.json")
    for frozen in json.loads(file.read_text()):
        x, how = np.array(frozen["x"], np.float32), [frozen[name] for name in ("bits", "symmetric", "clip")]
        assert ROUND_TRIP.reference(x, *how).tolist() == frozen["y"]
        assert run(x, *how).tolist() == frozen["y"]
