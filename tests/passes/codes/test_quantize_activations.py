from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from pydantic import ValidationError

from graphopt.analysis.structure.product_codes import dequantize_of
from graphopt.ort.session import ACCURACY_LEVEL, open_session
from graphopt.passes.algebra.rotate import Rotate
from graphopt.passes.codes.quantize_activations import ALREADY, LM_HEAD, QuantizeActivations
from graphopt.passes.codes.quantize_weights import LinearFormat, QuantizeWeights
from graphopt.runtime_ops import OPERATORS
from graphopt.runtime_ops.matmul_table.spec.op import dequantize
from tests.graphs import canonical, residual_model, run_pass, save


def quantized(linear: LinearFormat | None = None, **given: Any) -> ir.Model:
    model = residual_model(width=32, inner=48, **given)
    chosen = linear or LinearFormat(group=16)
    QuantizeWeights(linear=chosen, lm_head=chosen, embedding=None)(model)
    return model


def run(model: ir.Model, **options: Any) -> Any:
    return QuantizeActivations(**options)(model).report


def node_of(model: ir.Model, name: str) -> ir.Node:
    return next(node for node in model.graph if node.name == name)


def rotated() -> ir.Model:
    """Return a model with a Hadamard in front of both down projections, quantized."""
    model = residual_model(width=32, inner=48)
    Rotate(residual=None, value=None, weight_inputs="hadamard")(model)
    QuantizeWeights(linear=LinearFormat(group=16), lm_head=LinearFormat(group=16))(model)
    return model


@pytest.mark.parametrize("linear", [LinearFormat(group=16), LinearFormat(format="nf4", group=32)])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_product_but_the_head_is_rewritten(linear: LinearFormat, bits: int) -> None:
    model = quantized(linear)
    report = run(model, bits=bits, clip=0.9)
    rounded = [node for node in model.graph if node.op_type == "RoundActivations"]
    assert [use.node.name for node in rounded for use in node.outputs[0].uses()][:4] == ["up0", "down0", "up1", "down1"]
    # what the head's format says about its input stays
    per_token = [node for node in rounded if not node.attributes["group"].as_int()]
    assert len(rounded) - len(per_token) == (linear.format == "nf4")
    for node in per_token:
        stated = {name: attribute.value for name, attribute in node.attributes.items()}
        assert stated == {"activations": f"int{bits}", "group": 0, "clip": pytest.approx(0.9)}
    assert [(skip.where, skip.reason) for skip in report.skips] == [("head", LM_HEAD())]
    assert [change.what.figures["input"] for change in report.changes] == [
        "norm0.out",
        "sigmoid0.out",
        "norm1.out",
        "sigmoid1.out",
    ]
    assert ("ai.graphopt", "RoundActivations", "") in model.functions
    # codes stay as they were
    reader = dequantize_of(node_of(model, "up0"))
    assert reader.op_type == ("Dequantize" if linear.format == "nf4" else "DequantizeLinear")
    assert not [value.name for value in model.graph.initializers.values() if not value.uses()]


@pytest.mark.parametrize(("bits", "activations"), [(4, "uint4"), (8, "int8")])
def test_scales_per_group_are_in_the_groups_of_the_weight(bits: int, activations: str) -> None:
    model = quantized(LinearFormat(format="nl4", group=16))
    run(model, bits=bits, scales="group")
    rounded = {
        use.node.name: node
        for node in model.graph
        if node.op_type == "RoundActivations"
        for use in node.outputs[0].uses()
    }
    for name in ("up0", "down0", "up1", "down1"):
        stated = {key: attribute.value for key, attribute in rounded[name].attributes.items()}
        assert stated == {"activations": activations, "group": 16, "clip": 1.0}
    assert rounded["head"].attributes["activations"].value == "int8"  # what its format asked for
    run_pass(model, "lower")
    assert {node.op_type for node in model.graph} >= {"MatMulTable"}
    assert node_of(model, "down0").attributes["activations"].value == activations


def test_an_input_of_several_products_is_rounded_once(llama_canonical: ir.Model) -> None:
    chosen = LinearFormat(group=16)
    QuantizeWeights(linear=chosen, lm_head=None, embedding=None)(llama_canonical)
    run(llama_canonical)
    rounded = [node for node in llama_canonical.graph if node.op_type == "RoundActivations"]
    assert [len(node.outputs[0].uses()) for node in rounded] == 2 * [3, 1, 2, 1]


def test_the_numbers_of_the_weights_stay_until_they_are_packed_and_beyond() -> None:
    model = quantized()
    before = node_of(model, "up0.dequantize")
    codes, scales = (value.const_value.numpy() for value in before.inputs)
    expected = codes.astype(np.float64) * np.repeat(scales.astype(np.float64), 16, axis=0)
    run(model)
    run_pass(model, "lower")
    packed = [value.const_value.numpy() for value in node_of(model, "up0").inputs[1:5]]
    assert packed[1].dtype == np.float16
    assert np.array_equal(dequantize(*packed, rows=32, columns=48, group=16), expected)


def test_the_logical_form_computes_what_the_product_does(tmp_path: Path) -> None:
    """Bodies of Dequantize and RoundActivations against the kernel that takes their place."""
    model = rotated()
    run(model, bits=8)
    ids = {"input_ids": np.random.default_rng(0).integers(0, 24, (2, 6))}
    entries = {ACCURACY_LEVEL: "0"}
    (before,) = open_session(save(model, tmp_path, "logical.onnx"), entries=entries).run(["logits"], ids)
    run_pass(model, "lower")
    (after,) = open_session(save(model, tmp_path, "lowered.onnx"), entries=entries).run(["logits"], ids)
    # a number on the edge between two codes may go the other way: one step of 127, through two layers
    assert np.abs(before - after).max() < 2e-2 * np.abs(before).max()
    assert np.median(np.abs(before - after)) < 1e-5 * np.abs(before).max()


@pytest.mark.parametrize("options", [{"bits": 8}, {"bits": 4, "scales": "group"}])
def test_the_body_and_the_kernel_compute_what_the_definition_says(tmp_path: Path, options: dict[str, Any]) -> None:
    model = rotated()
    run(model, **options)
    run_pass(model, "lower")
    down = node_of(model, "down0")
    model.graph.outputs.extend([down.inputs[0], down.outputs[0]])
    names = [down.inputs[0].name, down.outputs[0].name]
    ids = {"input_ids": np.random.default_rng(0).integers(0, 24, (2, 6))}
    path = save(model, tmp_path)
    constants = [value.const_value.numpy() for value in down.inputs[1:]]
    attributes = {name: attribute.value for name, attribute in down.attributes.items()}
    for native in (False, True):
        x, y = open_session(path, native=native).run(names, ids)
        expected = OPERATORS[down.op_type].reference(x, *constants, **attributes)
        # a number on the edge between two codes may go the other way under float32: one step of 127, once; the input
        # of uint4 is what it reads, behind the rotation, so nothing goes the other way
        assert np.abs(y - expected).max() < 1e-2 * np.abs(expected).max()
        assert np.median(np.abs(y - expected)) < 1e-6 * np.abs(expected).max()


def test_a_rotation_that_only_this_product_reads_runs_inside_it() -> None:
    model = rotated()
    in_front = {node.name: node.inputs for node in model.graph if node.op_type == "Hadamard"}
    assert in_front
    run(model)
    report = run_pass(model, "lower")
    left = [node for node in model.graph if node.op_type == "Hadamard"]
    assert [node.outputs[0].uses()[0].node.name for node in left] in ([], ["head"])
    down = node_of(model, "down0")
    assert down.inputs[0].name == "sigmoid0.out"
    assert down.inputs[6].const_value.numpy().shape[0] * down.inputs[7].const_value.numpy().shape[0] == 48
    assert any("hadamard inside" in str(change.what) for change in report.changes)


def test_a_rotation_that_others_read_too_stays_in_front() -> None:
    model = rotated()
    shared = next(node for node in model.graph if node.op_type == "Hadamard" and node.inputs[0].name == "sigmoid0.out")
    model.graph.outputs.append(shared.outputs[0])
    run(model)
    run_pass(model, "lower")
    assert node_of(model, "down0").inputs[0] is shared.outputs[0]


def test_what_is_left_alone_has_its_reason() -> None:
    model = residual_model(width=32, inner=48)
    assert {str(skip.reason) for skip in run(model).skips} == {"its weights are not quantized"}
    model = quantized()
    assert run(model, lm_head=True).skips == []
    assert {skip.reason for skip in run(model, lm_head=True).skips} == {ALREADY(activations="int8")}
    assert len(run(model, lm_head=True).skips) == 5


def test_groups_that_no_kernel_of_ours_takes_are_left_alone() -> None:
    model = quantized()
    node_of(model, "up0.dequantize").attributes["block_size"] = ir.AttrInt64("block_size", 8)
    assert any(skip.where == "up0" and "no multiple of 16" in str(skip.reason) for skip in run(model).skips)


def test_a_router_is_left_alone(make_artifact: Callable[[str], Path]) -> None:
    model = canonical(make_artifact("mixtral"))
    QuantizeWeights(linear=LinearFormat(group=16), lm_head=LinearFormat(group=16))(model)
    report = run(model)
    assert [str(skip.reason) for skip in report.skips if "gate.Gemm" in skip.where] == [
        "its weights are not quantized"
    ] * 2
    rounded = [node for node in model.graph if node.op_type == "RoundActivations"]
    readers = [use.node.name for node in rounded for use in node.outputs[0].uses()]
    assert len([name for name in readers if ".experts." in name]) == 2 * 4 * 2


@pytest.mark.parametrize("bad", [{"bits": 6}, {"clip": 0.0}, {"clip": 1.5}, {"scales": "group", "clip": 0.9}])
def test_options_that_cannot_run_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        QuantizeActivations(**bad)
