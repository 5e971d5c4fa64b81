from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.passes.phases import CANONICAL_OPSETS
from graphopt.runtime_ops.dequantize.spec.op import DEQUANTIZE, reference
from graphopt.runtime_ops.matmul_table.spec.op import dequantize as unpacked
from graphopt.runtime_ops.matmul_table.spec.packing import pack, tile
from tests.runtime_ops.bodies import run_body


def case_of(
    rows: int, columns: int, group: int, entries: int, *, points: bool, dtype: type = np.float32, seed: int = 0
) -> list[np.ndarray]:
    """Return codes, scales, table and zero points of random numbers."""
    random = np.random.default_rng(seed)
    shape = (-(-rows // group), columns)
    return [
        random.integers(0, entries, (rows, columns)).astype(np.uint8),
        random.uniform(0.1, 1, shape).astype(dtype),
        random.standard_normal(entries).astype(np.float32),
        random.standard_normal(shape if points else (1, 1)).astype(dtype) * points,
    ]


CASES = {
    "rows": st.integers(1, 70),
    "columns": st.integers(1, 40),
    "group": st.sampled_from([0, 16, 48]),
    "entries": st.sampled_from([1, 2, 3, 16, 255, 256]),
    "points": st.booleans(),
    "dtype": st.sampled_from([np.float16, np.float32]),
    "seed": st.integers(0, 1000),
}


@settings(max_examples=25)
@given(**CASES)
def test_the_body_is_the_reference_to_the_last_bit(group: int, rows: int, **given: Any) -> None:
    inputs = case_of(rows, group=group or rows, **given)
    for more in ({}, {"minimums": 1}):
        made = run_body(DEQUANTIZE.name, inputs, {"group": group or rows, **more})
        # the same two operations of float32
        np.testing.assert_array_equal(made, reference(*inputs, group or rows, **more))


def test_minimums_are_one_or_none() -> None:
    with pytest.raises(Exception, match="minimums must be 0 or 1, it is 2"):
        run_body(DEQUANTIZE.name, case_of(32, 5, 16, 8, points=True), {"group": 16, "minimums": 2})


@settings(max_examples=25)
@given(**CASES)
def test_it_is_the_weight_of_the_packed_product(group: int, rows: int, **given: Any) -> None:
    codes, scales, table, points = case_of(rows, group=group or rows, **given)
    bits = max(1, int(len(table) - 1).bit_length())
    full = np.broadcast_to(points, scales.shape)
    weight = unpacked(pack(codes, bits), tile(scales), table, tile(full), rows, codes.shape[1], group or rows)
    made = reference(codes, scales, table, points, group or rows)
    # a difference and a product, each rounded by half a unit of float32
    assert (np.abs(made - weight) <= 2**-23 * np.abs(weight) + 2**-149 * 2).all()


@pytest.mark.parametrize("opset", CANONICAL_OPSETS)
def test_the_body_runs_in_every_opset_that_passes_take(opset: int) -> None:
    inputs = case_of(37, 5, 16, 8, points=True)
    np.testing.assert_array_equal(run_body(DEQUANTIZE.name, inputs, {"group": 16}, opset), reference(*inputs, 16))


def test_what_does_not_fit_is_an_error() -> None:
    codes, scales, table, points = case_of(32, 5, 16, 8, points=False)
    with pytest.raises(ValueError, match=r"codes \[32, 5\] in groups of 8 have scales \[4, 5\], not \[2, 5\]"):
        reference(codes, scales, table, points, 8)
    codes[3, 3] = 8
    with pytest.raises(IndexError):
        reference(codes, scales, table, points, 16)
    with pytest.raises(Exception, match="Gather"):
        run_body(DEQUANTIZE.name, [codes, scales, table, points], {"group": 16})


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_scales_that_are_not_finite_show(bad: float) -> None:
    inputs = case_of(32, 5, 16, 8, points=False)
    inputs[1][1, 2] = bad
    for made in (reference(*inputs, 16), run_body(DEQUANTIZE.name, inputs, {"group": 16})):
        assert not np.isfinite(made[16:, 2]).any()
        assert np.isfinite(made[:16]).all()


def test_frozen_vectors_keep_their_meaning() -> None:
    """Never regenerate the file: a change that it does not survive is a new version of the operator."""
    for frozen in json.loads(
        files("graphopt.runtime_ops").joinpath("dequantize", "vectors", "version1.json").read_text()
    ):
        types = (np.uint8, np.float16, np.float32, np.float16)
        names = ("codes", "scales", "table", "zero_points")
        inputs = [np.array(frozen[name], dtype) for name, dtype in zip(names, types, strict=True)]
        assert reference(*inputs, frozen["group"]).tolist() == frozen["W"]
        assert run_body(DEQUANTIZE.name, inputs, {"group": frozen["group"]}).tolist() == frozen["W"]


def test_cost() -> None:
    cost = DEQUANTIZE.cost([(32, 5), (2, 5), (8,), (1, 1)])
    assert (cost.operations, cost.bytes) == (3 * 160, 5 * 160 + 4 * (10 + 8 + 1))
