"""MatMulNBits rounds its inputs to int8 where its level lets it: measured, and no other node is touched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.compile.doctor import planted_models
from tests.graphs import run_pass, session

X = np.random.default_rng(5).standard_normal((3, 128)).astype(np.float32)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_outputs_move_by_what_rounding_moves(bits: int, level: int, tmp_path: Path) -> None:
    model = ir.load(planted_models.products_with_codes(tmp_path / "model.onnx", bits=bits, level=level))
    (before,) = session(model, tmp_path / "before").run(None, {"x": X})
    report = run_pass(model, "accuracy_level")
    assert report.effect == "lossy"
    assert [c.what.figures for c in report.changes] == [{"group": 32, "before": level}]
    assert model.graph.node("product").attributes.get_int("accuracy_level") == 4
    (after,) = session(model, tmp_path / "after").run(None, {"x": X})
    # An input moves by 1/254 of its group's largest, at random: sqrt(128) such steps of a weight's size, six sigma.
    codes = model.graph.initializers["codes"].const_value
    scales = model.graph.initializers["scales"].const_value
    assert codes is not None
    assert scales is not None
    weight = float(scales.numpy().max()) * (1 << bits) / 2
    assert 0 < np.abs(after - before).max() <= 6 * np.sqrt(128) * np.abs(X).max() / 254 * weight


@pytest.mark.parametrize("level", [2, 3, 4])
def test_levels_that_someone_chose_stay(level: int, tmp_path: Path) -> None:
    model = ir.load(planted_models.products_with_codes(tmp_path / "model.onnx", level=level))
    report = run_pass(model, "accuracy_level")
    assert (report.changes, report.effect) == ([], "exact")
    assert model.graph.node("product").attributes.get_int("accuracy_level") == level
