from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.graphs import logits, relative, residual_model, session
from tests.passes.lift.canonicalize.common import FLOAT32, canonicalize, center, decompose, node_of


@pytest.mark.parametrize("square", ["Pow", "Mul"])
@pytest.mark.parametrize("division", ["Div", "Reciprocal", "one over"])
@pytest.mark.parametrize("gain_first", [True, False])
def test_decomposed_norms_become_the_standard_op(tmp_path: Path, square: str, division: str, gain_first: bool) -> None:
    model = residual_model(layers=1)
    before = logits(model, tmp_path / "before")
    for norm in [node for node in model.graph if node.op_type == "RMSNormalization"]:
        decompose(model.graph, norm, square, division, gain_first)
    assert relative(before, logits(model, tmp_path / "spelled out")) < FLOAT32
    canonicalize(model)
    kinds = Counter(node.op_type for node in model.graph)
    assert (kinds["RMSNormalization"], kinds["Sqrt"]) == (2, 0)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


def test_norms_that_share_a_gain_get_names_of_their_own(tmp_path: Path) -> None:
    # Exporters give equal gains one initializer; onnxruntime refuses two nodes of one name.
    model = residual_model(layers=1)
    norms = [node for node in model.graph if node.op_type == "RMSNormalization"]
    norms[1].replace_input_with(1, norms[0].inputs[1])
    before = logits(model, tmp_path / "before")
    for norm in norms:
        decompose(model.graph, norm, "Pow", "Div", gain_first=False)
    canonicalize(model)
    assert len({node.name for node in model.graph if node.op_type == "RMSNormalization"}) == 2
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("spelled_out", ["the mean", "all"])
def test_decomposed_layer_norms_become_the_standard_op(tmp_path: Path, biased: bool, spelled_out: str) -> None:
    model = residual_model(layers=1, layer_norm=True)
    for norm in [node for node in model.graph if node.op_type == "LayerNormalization"]:
        if not biased:
            norm.resize_inputs(2)
    before = logits(model, tmp_path / "before")
    for norm in [node for node in model.graph if node.op_type == "LayerNormalization"]:
        normed, _ = center(model, norm)
        if spelled_out == "all":
            decompose(model.graph, normed, "Pow", "Div", gain_first=False)
    assert relative(before, logits(model, tmp_path / "spelled out")) < FLOAT32
    canonicalize(model)
    kinds = Counter(node.op_type for node in model.graph)
    assert kinds["LayerNormalization"] == 2
    assert kinds["RMSNormalization"] == kinds["ReduceMean"] == kinds["Sub"] == 0
    norms = [node for node in model.graph if node.op_type == "LayerNormalization"]
    # onnxruntime 1.31 crashes the process while it optimizes a LayerNormalization whose third input is empty
    assert {len(node.inputs) for node in norms} == {3 if biased else 2}
    assert len({node.name for node in norms}) == 2
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


def mean_without_its_axis(model: ir.Model, norm: ir.Node) -> None:
    center(model, norm, keepdims=0)


def norm_over_two_axes(model: ir.Model, norm: ir.Node) -> None:
    normed, _ = center(model, norm)
    normed.attributes["axis"] = ir.AttrInt64("axis", 1)


def gain_that_is_computed(model: ir.Model, norm: ir.Node) -> None:
    normed, centered = center(model, norm)
    gain = ir.node("Sigmoid", [centered], name="gain")
    gain.outputs[0].dtype = ir.DataType.FLOAT
    model.graph.insert_before(normed, gain)
    normed.replace_input_with(1, gain.outputs[0])


def centered_is_read(model: ir.Model, norm: ir.Node) -> None:
    _, centered = center(model, norm)
    node_of(model, "residual0").replace_input_with(0, centered)


def test_a_number_behind_a_layer_norm_is_a_bias_of_equal_numbers(tmp_path: Path) -> None:
    model = residual_model(layers=1, layer_norm=True)
    norm = node_of(model, "norm0")
    norm.resize_inputs(2)
    normed, _ = center(model, norm)
    number = ir.val("number", const_value=ir.tensor(np.array([0.5], np.float32), name="number"))
    model.graph.initializers["number"] = number
    shifted = ir.node("Add", [normed.outputs[0], number], name="shifted")
    shifted.outputs[0].dtype, shifted.outputs[0].shape = ir.DataType.FLOAT, normed.outputs[0].shape
    normed.outputs[0].replace_all_uses_with(shifted.outputs[0])
    shifted.replace_input_with(0, normed.outputs[0])
    model.graph.insert_after(normed, shifted)
    before = logits(model, tmp_path / "before")
    canonicalize(model)
    norm = next(node for node in model.graph if node.op_type == "LayerNormalization")
    assert (norm.inputs[2].const_value.numpy() == 0.5).all()
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


@pytest.mark.parametrize("twist", [mean_without_its_axis, norm_over_two_axes, gain_that_is_computed, centered_is_read])
def test_what_only_looks_like_a_layer_norm_stays(tmp_path: Path, twist: Callable[[ir.Model, ir.Node], None]) -> None:
    # One row of as many tokens as coordinates: a mean that lost its axis is spread over another, without an error.
    ids = {"input_ids": np.arange(5)[None]}
    model = residual_model(width=5, layers=1, layer_norm=True)
    for norm in [node for node in model.graph if node.op_type == "LayerNormalization"]:
        norm.resize_inputs(2)
    twist(model, node_of(model, "norm0"))
    before = session(model, tmp_path / "before").run(["logits"], ids)[0]
    canonicalize(model)
    assert node_of(model, "norm0.RMSNormalization").op_type == "RMSNormalization"
    assert relative(before, session(model, tmp_path / "after").run(["logits"], ids)[0]) < FLOAT32
