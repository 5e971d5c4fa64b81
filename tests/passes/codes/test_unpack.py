from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.compile.pipeline import optimize
from graphopt.numerics.formats import FORMATS
from graphopt.passes.codes.quantize_weights import LinearFormat
from graphopt.passes.codes.unpack import HAS_ZERO_POINTS, NOT_CONSTANT, NOT_FLOAT
from graphopt.passes.recipe import Recipe, load_recipe
from tests.graphs import residual_model, run_pass


def packed(linear: LinearFormat, activations: str = "int8", bits: int | None = None, rotated: bool = False) -> ir.Model:
    """Return a lowered model of four packed products and a head."""
    model = residual_model(width=32, inner=48)
    if rotated:
        run_pass(model, "rotate", residual=None, value=None, weight_inputs="hadamard")
    run_pass(model, "quantize_weights", linear=linear, lm_head=linear, embedding=None, activations=activations)
    if bits is not None:
        run_pass(model, "quantize_activations", bits=bits, clip=0.9, lm_head=True)
    run_pass(model, "lower")
    return model


def contents(model: ir.Model) -> dict[str, Any]:
    """Return nodes and numbers by name, without their history."""
    nodes = {
        node.name: (
            node.op_type,
            [value.name for value in node.inputs],
            [value.name for value in node.outputs],
            {name: attribute.value for name, attribute in node.attributes.items()},
        )
        for node in model.graph
    }
    tensors = {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}
    return {**nodes, **{name: (array.dtype, array.shape, array.tobytes()) for name, array in tensors.items()}}


@pytest.mark.parametrize(
    ("linear", "more"),
    [
        (LinearFormat(format="nf4", group=16), {}),
        (LinearFormat(format="uint5", group=16), {"activations": "int16"}),
        (LinearFormat(format="ternary", group=None), {"activations": "float32"}),
        (LinearFormat(format="int4", group=16), {"bits": 8}),
        (LinearFormat(format="uint4", group=16), {"bits": 4, "rotated": True}),
        (LinearFormat(format="fp6-e2m3", group=32), {"bits": 8, "rotated": True}),
        (LinearFormat(format="t3", group=16), {}),
        (LinearFormat(format="t2", group=32), {"bits": 8, "rotated": True}),
    ],
)
def test_lowering_again_makes_the_same_model(linear: LinearFormat, more: dict[str, Any]) -> None:
    model = packed(linear, **more)
    before = contents(model)
    report = run_pass(model, "unpack")
    assert not report.skips
    kinds = {node.op_type for node in model.graph}
    assert not kinds & {"MatMulTable", "MatMulDynamic"}
    assert FORMATS[linear.format].operator in kinds
    assert ("Hadamard" in kinds) == more.get("rotated", False)
    run_pass(model, "lower")
    assert contents(model) == before


def test_products_that_share_an_input_can_be_merged_afterwards(llama_canonical: ir.Model) -> None:
    run_pass(llama_canonical, "quantize_weights", linear=LinearFormat(format="nf4", group=16))
    run_pass(llama_canonical, "lower")
    run_pass(llama_canonical, "unpack")
    run_pass(llama_canonical, "merge_products")
    run_pass(llama_canonical, "lower")
    assert [node.op_type for node in llama_canonical.graph].count("MatMulTable") == 2 * 4


def computed(node: ir.Node) -> None:
    same = ir.node("Identity", [node.inputs[2]], name="same")
    node.graph.insert_before(node, same)
    node.replace_input_with(2, same.outputs[0])


def shifted(node: ir.Node) -> None:
    scales = node.inputs[2].const_value.numpy()
    node.replace_input_with(4, constant(node.graph, np.ones_like(scales)))


def narrow(node: ir.Node) -> None:
    node.inputs[0].dtype = ir.DataType.FLOAT16


def constant(graph: ir.Graph, array: np.ndarray) -> ir.Value:
    value = ir.val("constant", const_value=ir.tensor(array, name="constant"))
    graph.register_initializer(value)
    return value


@pytest.mark.parametrize(
    ("format", "edit", "reason"),
    [
        ("nf4", computed, NOT_CONSTANT()),
        ("nf4", narrow, NOT_FLOAT(type="FLOAT16")),
        ("t4", shifted, HAS_ZERO_POINTS()),
    ],
)
def test_what_has_no_logical_form_stays_with_its_reason(format: str, edit: Any, reason: Any) -> None:
    model = packed(LinearFormat(format=format, group=16))
    edit(next(node for node in model.graph if node.name == "up0"))
    report = run_pass(model, "unpack")
    assert [(skip.where, skip.reason) for skip in report.skips] == [("up0", reason)]
    assert [node.op_type for node in model.graph].count("MatMulTable") == 1


def test_a_packed_artifact_goes_to_another_target_and_an_exact_recipe_leaves_it(
    llama_artifact: Path, tmp_path: Path
) -> None:
    optimize(llama_artifact, "fp6-rtn", tmp_path / "fp6")
    nothing = Recipe.model_validate({"name": "nothing", "steps": [{"step": "lower", "caches": "growing"}]})
    manifest = optimize(tmp_path / "fp6", nothing, tmp_path / "cpu", target="ort-cpu:avx512").manifest
    assert [report.name for report in manifest.passes][-4:] == ["unpack", "merge_products", "flatten_heads", "lower"]
    # exact, which means run and compared: the kernels are those of before
    unpacking = next(check for check in manifest.checks if check.after == "unpack")
    assert unpacking.figures["largest_change"] == 0
    assert manifest.precision is not None
    assert {(each.operator, each.count) for each in manifest.precision.products} == {("MatMulTable", 9)}
    again = optimize(tmp_path / "fp6", "rotate", tmp_path / "again").manifest
    assert "unpack" not in [report.name for report in again.passes]
    assert again.precision is not None
    assert {(each.operator, each.count) for each in again.precision.products} == {("MatMulTable", 15)}


def test_only_a_recipe_that_works_with_codes_unpacks() -> None:
    model = residual_model(width=32, inner=48)
    plain, works = load_recipe("rotate"), load_recipe("w4a8-rtn")
    assert works.fitting(model.graph) == works.with_lower().adding("compact_scales")
    run_pass(model, "quantize_weights", linear=LinearFormat(format="fp6-e2m3", group=16), lm_head=None)
    run_pass(model, "lower")
    assert plain.fitting(model.graph) == plain.with_lower()
    names = [step.name for step in works.fitting(model.graph).steps]
    assert names == ["canonicalize", "unpack", "quantize_weights", "quantize_activations", "lower", "compact_scales"]
