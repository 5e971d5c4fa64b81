"""Zero points of MatMulNBits as codes: the same weights, or a reason why they stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.passes.lower.integer_zero_points import pack
from tests.compile.doctor import planted_models
from tests.graphs import run_pass, session

ONES = np.eye(128, dtype=np.float32)


@given(st.sampled_from([2, 4, 8]), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_codes_lie_from_the_lowest_bit_on_and_columns_begin_at_bytes(
    bits: int, columns: int, groups: int, seed: int
) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (columns, groups)).astype(np.uint8)
    row_bytes = pack(codes, bits).reshape(columns, -1)
    assert row_bytes.shape[1] == -(-groups * bits // 8)
    for column in range(columns):
        number = int.from_bytes(row_bytes[column].tobytes(), "little")
        assert [(number >> (bits * group)) % (1 << bits) for group in range(groups)] == codes[column].tolist()


@pytest.mark.parametrize("bits", [2, 4])
def test_the_same_weights_in_fewer_bytes(bits: int, tmp_path: Path) -> None:
    model = ir.load(planted_models.products_with_codes(tmp_path / "model.onnx", bits=bits, zeros="whole"))
    (before,) = session(model, tmp_path / "before").run(None, {"x": ONES})
    report = run_pass(model, "integer_zero_points")
    assert report.effect == "exact"
    assert [c.what.figures for c in report.changes] == [{"count": 1024, "bits": bits}]
    zeros = model.graph.initializers["zeros.codes"]
    assert (zeros.dtype, zeros.const_value.nbytes if zeros.const_value else 0) == (ir.DataType.UINT8, 1024 * bits // 8)
    assert "zeros" not in model.graph.initializers
    (after,) = session(model, tmp_path / "after").run(None, {"x": ONES})
    # (code - zero) scale is exact up to one rounding of float32; one way computes code scale - zero scale.
    assert np.abs(after - before).max() <= 2 * 2.0**-24 * (1 << bits)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_between_codes_stay_with_the_reason(bits: int, tmp_path: Path) -> None:
    model = ir.load(planted_models.products_with_codes(tmp_path / "model.onnx", bits=bits, zeros="between"))
    report = run_pass(model, "integer_zero_points")
    assert not report.changes
    assert [(s.where, s.reason.code) for s in report.skips] == [("product", "integer_zero_points.not-whole")]
    assert str(report.skips[0].reason) == f"zero points of zeros are no whole codes of {bits} bits"
    assert "zeros" in model.graph.initializers


def test_a_product_without_zero_points_has_none_to_pack(tmp_path: Path) -> None:
    report = run_pass(ir.load(planted_models.products_with_codes(tmp_path / "model.onnx")), "integer_zero_points")
    assert (report.changes, report.skips) == ([], [])
