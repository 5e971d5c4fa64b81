from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from pydantic import ValidationError

from graphopt.passes.algebra.rotate import Rotate, RotateOptions
from graphopt.passes.codes.quantize_activations import QuantizeActivations, QuantizeActivationsOptions
from graphopt.passes.codes.quantize_weights import LinearFormat, QuantizeWeights, QuantizeWeightsOptions
from graphopt.runtime import open_session
from graphopt.runtime_ops import OPERATORS
from tests.graphs import canonical, residual_model, save


def quantized(linear: LinearFormat | None = None, **given: Any) -> ir.Model:
    model = residual_model(width=32, inner=48, **given)
    chosen = linear or LinearFormat(group=16)
    QuantizeWeights(QuantizeWeightsOptions(linear=chosen, head=chosen, embedding=None))(model)
    return model


def run(model: ir.Model, **options: Any) -> Any:
    return QuantizeActivations(QuantizeActivationsOptions(**options))(model).report


def node_of(model: ir.Model, name: str) -> ir.Node:
    return next(node for node in model.graph if node.name == name)


def rotated() -> ir.Model:
    """Return a model with a Hadamard in front of both down projections, quantized."""
    model = residual_model(width=32, inner=48)
    Rotate(RotateOptions(residual=None, value=None, weight_inputs="hadamard"))(model)
    QuantizeWeights(QuantizeWeightsOptions(linear=LinearFormat(group=16), head=LinearFormat(group=16)))(model)
    return model


@pytest.mark.parametrize("linear", [LinearFormat(group=16), LinearFormat(format="nf4", group=32)])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_product_but_the_head_is_rewritten(linear: LinearFormat, bits: int) -> None:
    model = quantized(linear)
    report = run(model, bits=bits, clip=0.9)
    kinds = Counter(node.op_type for node in model.graph)
    assert kinds["MatMulDynamic"] == 4
    assert [(skip.where, skip.reason) for skip in report.skips] == [
        ("head", "it makes the logits: its input is rounded only if the recipe asks for it")
    ]
    up = node_of(model, "up0")
    assert [up.attributes[name].as_int() for name in ("rows", "columns", "group", "bits")] == [
        32,
        48,
        linear.group,
        bits,
    ]
    assert up.attributes["clip"].as_float() == pytest.approx(0.9)
    assert [value.const_value.numpy().tolist() for value in up.inputs[6:]] == [[[1]], [[1]]]
    assert ("ai.graphopt", "MatMulDynamic", "") in model.functions
    # nothing of the form before is left
    assert {node.outputs[0].uses()[0].node.name for node in model.graph if node.op_type == "DequantizeLinear"} <= {
        "head"
    }
    assert not [value.name for value in model.graph.initializers.values() if not value.uses()]


def test_the_numbers_of_the_weights_stay() -> None:
    model = quantized()
    before = node_of(model, "up0.dequantize")
    codes, scales = (value.const_value.numpy() for value in before.inputs)
    expected = codes.astype(np.float64) * np.repeat(scales.astype(np.float64), 16, axis=0)
    run(model)
    from graphopt.runtime_ops.matmul_table.spec.op import dequantize

    packed = [value.const_value.numpy() for value in node_of(model, "up0").inputs[1:5]]
    assert packed[1].dtype == np.float16
    assert np.array_equal(dequantize(*packed, rows=32, columns=48, group=16), expected)


def test_the_body_and_the_kernel_compute_what_the_definition_says(tmp_path: Path) -> None:
    model = rotated()
    run(model, bits=8)
    down = node_of(model, "down0")
    model.graph.outputs.extend([down.inputs[0], down.outputs[0]])
    names = [down.inputs[0].name, down.outputs[0].name]
    ids = {"input_ids": np.random.default_rng(0).integers(0, 24, (2, 6))}
    path = save(model, tmp_path)
    constants = [value.const_value.numpy() for value in down.inputs[1:]]
    attributes = {name: attribute.value for name, attribute in down.attributes.items()}
    for native in (False, True):
        x, y = open_session(path, native=native).run(names, ids)
        expected = OPERATORS["MatMulDynamic"].reference(x, *constants, **attributes)
        # a number on the edge between two codes may go the other way under float32: one step of 127, once
        assert np.abs(y - expected).max() < 1e-2 * np.abs(expected).max()
        assert np.median(np.abs(y - expected)) < 1e-6 * np.abs(expected).max()


def test_a_rotation_that_only_this_product_reads_runs_inside_it() -> None:
    model = rotated()
    in_front = {node.name: node.inputs for node in model.graph if node.op_type == "Hadamard"}
    assert in_front
    report = run(model)
    left = [node for node in model.graph if node.op_type == "Hadamard"]
    assert [node.outputs[0].uses()[0].node.name for node in left] in ([], ["head"])
    down = node_of(model, "down0")
    assert down.inputs[0].name == "sigmoid0.out"
    assert down.inputs[6].const_value.numpy().shape[0] * down.inputs[7].const_value.numpy().shape[0] == 48
    assert any("hadamard inside" in change.what for change in report.changes)


def test_a_rotation_that_others_read_too_stays_in_front() -> None:
    model = rotated()
    shared = next(node for node in model.graph if node.op_type == "Hadamard" and node.inputs[0].name == "sigmoid0.out")
    model.graph.outputs.append(shared.outputs[0])
    run(model)
    assert node_of(model, "down0").inputs[0] is shared.outputs[0]


def test_what_is_left_alone_has_its_reason() -> None:
    model = residual_model(width=32, inner=48)
    assert {skip.reason for skip in run(model).skips} == {"its weights are not quantized"}
    model = quantized()
    assert run(model, head=True).skips == []
    assert {skip.reason for skip in run(model, head=True).skips} == {"its input is already rounded to 8 bits"}
    assert len(run(model, head=True).skips) == 5


def test_groups_that_no_kernel_of_ours_takes_are_left_alone() -> None:
    model = quantized()
    node_of(model, "up0.dequantize").attributes["block_size"] = ir.AttrInt64("block_size", 8)
    assert any(skip.where == "up0" and "no multiple of 16" in skip.reason for skip in run(model).skips)


def test_a_router_is_left_alone(make_artifact: Callable[[str], Path]) -> None:
    model = canonical(make_artifact("mixtral"))
    QuantizeWeights(QuantizeWeightsOptions(linear=LinearFormat(group=16), head=LinearFormat(group=16)))(model)
    report = run(model)
    assert [skip.reason for skip in report.skips if "gate.Gemm" in skip.where] == ["its weights are not quantized"] * 2
    assert len([change for change in report.changes if ".experts." in change.where]) == 2 * 4 * 2


@pytest.mark.parametrize("bad", [{"bits": 6}, {"clip": 0.0}, {"clip": 1.5}])
def test_options_that_cannot_run_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        QuantizeActivationsOptions(**bad)
