"""Scales in half the bytes: the same numbers, the same kernel, and back again when the model is optimized once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.analysis.structure.cost import weight_totals
from graphopt.analysis.structure.scales import leveled_nodes, scale_values, widened_scales
from graphopt.compile.pipeline import optimize
from graphopt.compile.replay import verify
from graphopt.ort.session import open_session
from graphopt.passes.codes.quantize_weights import EmbeddingFormat, LinearFormat
from graphopt.passes.context import make_context
from graphopt.passes.lower.compact_scales import CompactScales
from graphopt.passes.recipe import load_recipe
from graphopt.runtime_ops import declare
from graphopt.tasks import task_of
from tests.graphs import logits, residual_model, run_pass, save
from tests.passes.codes.test_keep_codes import exact_logits, model_and_file


def quantized(*, tied: bool = False, name: str = "int4") -> ir.Model:
    model = residual_model(width=32, tied=tied)
    linear = LinearFormat(format=name, group=16)
    run_pass(model, "canonicalize")
    run_pass(model, "quantize_weights", linear=linear, lm_head=linear, embedding=EmbeddingFormat(group=16))
    run_pass(model, "lower")
    return model


def numbers(model: ir.Model) -> list[Any]:
    return [value.const_value.numpy() for value in scale_values(model.graph) if value.const_value is not None]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["int4", "uint8"])
def test_numbers_and_logits_stay_in_half_the_bytes(name: str, tied: bool, tmp_path: Path) -> None:
    model = quantized(tied=tied, name=name)
    before, scales = logits(model, tmp_path / "before"), numbers(model)
    report = run_pass(model, "compact_scales")
    assert report.effect == "exact"
    # An embedding of its own has float32 scales: quantize_weights rounds those of products alone.
    stored = widened_scales(model.graph)
    assert len(stored) == len(report.changes) == len(scales) - (not tied)
    assert all(value.dtype == ir.DataType.FLOAT16 for value in stored.values())
    kept = sorted(value.const_value.numpy().astype(np.float32).tobytes() for value in stored.values())
    assert set(kept) <= {array.tobytes() for array in scales}
    # onnxruntime runs the same graph
    assert np.array_equal(logits(model, tmp_path / "after"), before)


def test_onnxruntime_fuses_products_as_before(tmp_path: Path) -> None:
    model = quantized()
    run_pass(model, "compact_scales")
    open_session(save(model, tmp_path), optimized_to=tmp_path / "optimized.onnx")
    kinds = [node.op_type for node in ir.load(tmp_path / "optimized.onnx").graph]
    products = sum(node.op_type == "MatMul" for node in model.graph)
    assert kinds.count("MatMulNBits") == products > 0
    assert "MatMul" not in kinds


def test_scales_that_float16_does_not_hold_stay(tmp_path: Path) -> None:
    model = residual_model(width=32)
    for value in model.graph.initializers.values():
        if value.const_value is not None and len(value.shape or ()) == 2:
            value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1e-9), name=value.name)
    run_pass(model, "canonicalize")
    run_pass(model, "quantize_weights")
    report = run_pass(model, "compact_scales")
    assert not report.changes
    assert {str(skip.reason) for skip in report.skips} == {"float16 does not hold all of its numbers"}


@pytest.mark.parametrize("tied", [False, True])
def test_widening_gives_back_the_constants(tied: bool) -> None:
    model = quantized(tied=tied)
    before = numbers(model)
    parameters = weight_totals(model).parameters
    run_pass(model, "compact_scales")
    assert weight_totals(model).parameters == parameters
    report = run_pass(model, "widen_scales")
    assert report.effect == "exact"
    assert report.changes
    assert not widened_scales(model.graph)
    after = numbers(model)
    assert sorted(each.tobytes() for each in after) == sorted(each.tobytes() for each in before)


def test_codes_of_a_file_run_from_its_own_scales(tmp_path: Path) -> None:
    """Scales and minimums of K-quants as the file has them: the same bits, and numbers again when that is asked for."""
    model, file = model_and_file(tmp_path, ("Q2_K", "Q4_K", "IQ4_XS", "Q6_K"))
    run_pass(model, "keep_codes", file=file)
    run_pass(model, "lower", target="ort-cpu", instructions="avx2", activations="float32")
    declare(model)
    before, parameters = exact_logits(model, tmp_path / "before"), weight_totals(model).parameters
    report = run_pass(model, "compact_scales")
    forms = {change.what.figures["form"] for change in report.changes if "form" in change.what.figures}
    assert {form[0] for form in forms} >= {"4", "6"}  # bits
    assert leveled_nodes(model.graph)
    assert weight_totals(model).parameters == parameters
    declare(model)
    assert np.array_equal(exact_logits(model, tmp_path / "after"), before)
    run_pass(model, "widen_scales")
    assert not leveled_nodes(model.graph)
    declare(model)
    assert np.array_equal(exact_logits(model, tmp_path / "widened"), before)


def test_kernels_for_gpus_read_floats(tmp_path: Path) -> None:
    model, file = model_and_file(tmp_path, ("Q6_K",))
    run_pass(model, "keep_codes", file=file)
    run_pass(model, "lower", target="ort-cuda")
    CompactScales()(model, make_context(task_of(model.graph), "ort-cuda"))
    assert not leveled_nodes(model.graph)


def test_a_recipe_with_codes_has_the_step_and_another_has_not() -> None:
    graph = residual_model().graph
    names = [[step.name for step in load_recipe(name).fitting(graph).steps] for name in ("int4-rtn", "rotate")]
    assert names[0][-2:] == ["lower", "compact_scales"]
    assert "compact_scales" not in names[1]


def test_an_artifact_is_verified_and_optimized_again(llama_artifact: Path, tmp_path: Path) -> None:
    made = optimize(llama_artifact, "int4-rtn", tmp_path / "int4", quality_tokens=0)
    assert made.manifest.passes[-1].name == "compact_scales"
    verify(llama_artifact, tmp_path / "int4")
    again = optimize(tmp_path / "int4", "int4-rtn", tmp_path / "packed", target="ort-cpu:avx512", quality_tokens=0)
    names = [report.name for report in again.manifest.passes if report.changes]
    assert names[:5] == ["canonicalize", "quantize_weights", "lower", "compact_scales", "widen_scales"]
    assert again.manifest.weights is not None
    assert made.manifest.weights is not None
    assert again.manifest.weights.parameters == made.manifest.weights.parameters
