"""Batch normalization, factors and shifts of channels in the weights of the convolution in front of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.graphs import run_pass, session
from tests.tasks.graph import graphs

IMAGES = np.random.default_rng(7).standard_normal((2, 3, 16, 16)).astype(np.float32)


def test_all_that_follows_a_convolution_is_in_its_weight_and_bias(tmp_path: Path) -> None:
    model = ir.load(graphs.convolutions(tmp_path / "model.onnx", norms=True))
    before = session(model, tmp_path / "before").run(None, {"images": IMAGES})[0]
    report = run_pass(model, "fold_batch_norms")
    assert [change.what.figures["op_type"] for change in report.changes] == ["BatchNormalization", "Mul", "Add"]
    operators = [node.op_type for node in model.graph]
    # The other Add is that of the residual.
    assert (operators.count("BatchNormalization"), operators.count("Mul"), operators.count("Add")) == (0, 0, 1)
    after = session(model, tmp_path / "after").run(None, {"images": IMAGES})[0]
    # Three convolutions in float32, whose sums have other terms.
    np.testing.assert_allclose(after, before, atol=1e-5 * np.abs(before).max())


@pytest.mark.parametrize(
    ("attribute", "code"), [("training_mode", "training"), ("computed", "computed"), ("read", "other-reader")]
)
def test_what_cannot_be_folded_stays_with_its_reason(attribute: str, code: str, tmp_path: Path) -> None:
    model = ir.load(graphs.convolutions(tmp_path / "model.onnx", norms=True))
    norm = next(node for node in model.graph if node.op_type == "BatchNormalization")
    conv = next(node for node in model.graph if node.name == "first")
    if attribute == "training_mode":
        norm.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
    elif attribute == "computed":
        copy = ir.node("Identity", [conv.inputs[1]], name="copy")
        model.graph.insert_before(conv, copy)
        conv.replace_input_with(1, copy.outputs[0])
    else:
        model.graph.outputs.append(conv.outputs[0])
    report = run_pass(model, "fold_batch_norms")
    assert {skip.where: skip.reason.code for skip in report.skips}["norm"] == f"fold_batch_norms.{code}"
    assert norm.graph is model.graph


def test_a_weight_that_others_read_keeps_what_it_is_for_them(tmp_path: Path) -> None:
    model = ir.load(graphs.convolutions(tmp_path / "model.onnx", channels=3, norms=True))
    first, second = (next(node for node in model.graph if node.name == name) for name in ("first", "second"))
    second.replace_input_with(1, first.inputs[1])
    before = session(model, tmp_path / "before").run(None, {"images": IMAGES})[0]
    run_pass(model, "fold_batch_norms")
    after = session(model, tmp_path / "after").run(None, {"images": IMAGES})[0]
    np.testing.assert_allclose(after, before, atol=1e-5 * np.abs(before).max())
