from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphopt.passes.fold_norms import FoldNorms, FoldNormsOptions
from tests.graphs import logits, relative, residual_model

# float32: one rounding of each weight (6e-8) and sums of up to 16 terms, through 2 layers; seen 3e-7.
FLOAT32 = 3e-6


def fold(model: ir.Model) -> object:
    return FoldNorms(FoldNormsOptions())(model).report  # type: ignore[attr-defined]


def gains(model: ir.Model) -> list[np.ndarray]:
    return [node.inputs[1].const_value.numpy() for node in model.graph if node.op_type == "RMSNormalization"]


@given(
    seed=st.integers(0, 1000),
    width=st.sampled_from([4, 10, 16]),
    layers=st.integers(0, 3),
    biased=st.booleans(),
    tied=st.booleans(),
    post_norm=st.booleans(),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_logits_stay_and_gains_become_one(
    tmp_path: Path, seed: int, width: int, layers: int, biased: bool, tied: bool, post_norm: bool
) -> None:
    from graphopt.passes.canonicalize import Canonicalize, CanonicalizeOptions

    model = residual_model(width, layers=layers, seed=seed, biased=biased, tied=tied, post_norm=post_norm)
    before = logits(model, tmp_path / "before")
    Canonicalize(CanonicalizeOptions())(model)
    report = fold(model)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32
    # a post-norm's gain sits on the residual itself and must stay, with its reason; every other gain is folded
    folded = [bool((gain == 1).all()) for gain in gains(model)]
    assert folded.count(False) == (layers if post_norm else 0)
    stays = [skip for skip in report.skips if "read by Add" in skip.reason]
    assert len(stays) == (layers if post_norm else 0)


def test_a_gain_that_two_norms_share_is_folded_once_each(tmp_path: Path) -> None:
    model = residual_model()
    norms = [node for node in model.graph if node.op_type == "RMSNormalization"]
    for norm in norms:
        norm.replace_input_with(1, norms[0].inputs[1])
    before = logits(model, tmp_path / "before")
    fold(model)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32
    assert all((gain == 1).all() for gain in gains(model))


def test_a_weight_that_another_product_shares_is_copied_first(tmp_path: Path) -> None:
    model = residual_model()
    up = {node.name: node for node in model.graph}
    up["up1"].replace_input_with(1, up["up0"].inputs[1])
    before = logits(model, tmp_path / "before")
    fold(model)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


def test_a_norm_that_the_app_reads_stays(tmp_path: Path) -> None:
    model = residual_model()
    final = next(node for node in model.graph if node.name == "final_norm")
    model.graph.outputs.append(final.outputs[0])
    report = fold(model)
    assert [(skip.where, skip.reason) for skip in report.skips] == [
        ("final_norm", "its output is an output of the graph")
    ]
    assert not (gains(model)[-1] == 1).all()


@given(
    seed=st.integers(0, 1000),
    width=st.sampled_from([4, 10, 16]),
    layers=st.integers(0, 3),
    biased=st.booleans(),
    multiplier=st.sampled_from([None, 3.0]),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_layer_norms_become_root_mean_square_norms_of_gain_one(
    tmp_path: Path, seed: int, width: int, layers: int, biased: bool, multiplier: float | None
) -> None:
    model = residual_model(width, layers=layers, seed=seed, biased=biased, multiplier=multiplier, layer_norm=True)
    before = logits(model, tmp_path / "before")
    fold(model)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32
    assert not [node for node in model.graph if node.op_type == "LayerNormalization"]
    assert len(gains(model)) == layers + 1
    assert all((gain == 1).all() for gain in gains(model))
    # whatever writes the stream has mean zero along it
    table = model.graph.initializers["table"].const_value.numpy()
    assert np.abs(table.mean(1)).max() < 1e-6


def test_the_bias_of_a_norm_reaches_a_head_without_one_and_logits_keep_their_name(tmp_path: Path) -> None:
    model = residual_model(layers=1, layer_norm=True)
    fold(model)
    (output,) = model.graph.outputs
    assert output.name == "logits"
    assert output.producer().op_type == "Add"


@pytest.mark.parametrize("reader", ["graph output", "MatMul"])
def test_a_mean_that_something_else_would_miss_stays(tmp_path: Path, reader: str) -> None:
    model = residual_model(layers=1, layer_norm=True, observed=reader == "graph output")
    if reader == "MatMul":  # reads the stream without a norm in front
        up = next(node for node in model.graph if node.name == "up0")
        up.replace_input_with(0, next(node for node in model.graph if node.name == "embedding").outputs[0])
    before = logits(model, tmp_path / "before")
    report = fold(model)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32
    why = "graph output" if reader == "graph output" else "up0 reads the same basis without a norm"
    kept = {skip.where for skip in report.skips if "keeps its mean" in skip.reason and why in skip.reason}
    assert "final_norm" in kept
    assert any(node.op_type == "LayerNormalization" for node in model.graph)


def test_a_folded_layer_norm_that_keeps_its_mean_has_no_empty_input() -> None:
    # onnxruntime 1.31 crashes the process while it optimizes a LayerNormalization whose third input is empty
    model = residual_model(layers=1, layer_norm=True, observed=True)
    fold(model)
    assert {len(node.inputs) for node in model.graph if node.op_type == "LayerNormalization"} == {2}


def spans_two_axes(model: ir.Model, norm: ir.Node) -> None:
    norm.attributes["axis"] = ir.AttrInt64("axis", 1)


def mean_is_read(model: ir.Model, norm: ir.Node) -> None:
    """Let the layer add the mean of its norm to the stream."""
    norm.resize_outputs(2)
    mean = norm.outputs[1]
    mean.name, mean.dtype, mean.shape = "mean", ir.DataType.FLOAT, ir.Shape(["batch", "length", 1])
    stream = next(node for node in model.graph if node.name == "residual0")
    added = ir.node("Add", [stream.outputs[0], mean], name="add_mean")
    added.outputs[0].name, added.outputs[0].dtype = "add_mean.out", ir.DataType.FLOAT
    added.outputs[0].shape = stream.outputs[0].shape
    model.graph.insert_after(stream, added)
    stream.outputs[0].replace_all_uses_with(added.outputs[0])
    added.replace_input_with(0, stream.outputs[0])


def flows_back(model: ir.Model, norm: ir.Node) -> None:
    """Let the layer add what its norm computes, instead of what its weights make of it."""
    stream = next(node for node in model.graph if node.name == "residual0")
    stream.replace_input_with(1, norm.outputs[0])


@pytest.mark.parametrize("twist", [spans_two_axes, mean_is_read, flows_back])
def test_a_mean_that_cannot_move_stays_and_the_logits_with_it(
    tmp_path: Path, twist: Callable[[ir.Model, ir.Node], None]
) -> None:
    model = residual_model(layers=1, layer_norm=True)
    twist(model, next(node for node in model.graph if node.name == "norm0"))
    before = logits(model, tmp_path / "before")
    report = fold(model)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32
    assert {"norm0", "final_norm"} <= {skip.where for skip in report.skips if "keeps its mean" in skip.reason}
