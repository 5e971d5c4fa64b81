"""Scales in half the bytes: the same numbers, the same kernel, and back again when the model is optimized once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.analysis.structure.cost import weight_totals
from graphopt.analysis.structure.products import is_packed, reads_packed
from graphopt.analysis.structure.scales import leveled_nodes, scale_values, widened_scales
from graphopt.compile.pipeline import optimize
from graphopt.compile.replay import verify
from graphopt.ort.session import open_session
from graphopt.passes.codes.quantize_weights import EmbeddingFormat, LinearFormat
from graphopt.passes.context import make_context
from graphopt.passes.lower.compact_scales import DIGITS, CompactScales
from graphopt.passes.recipe import load_recipe
from graphopt.runtime_ops import declare, port
from graphopt.runtime_ops.matmul_table.spec.packing import unpack
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


@pytest.mark.parametrize(("kinds", "table"), [(("TQ1_0", "TQ2_0"), "TQ2_0"), (("TQ2_0", "Q4_K"), "Q8_0")])
def test_codes_of_three_values_are_digits(kinds: tuple[str, str], table: str, tmp_path: Path) -> None:
    """The same bits in fewer bytes, of matrices and of a table that is looked up; and codes again in the next run."""
    model, file = model_and_file(tmp_path, kinds, table)
    run_pass(model, "keep_codes", file=file)
    run_pass(model, "lower", target="ort-cpu", instructions="avx2", activations="float32")
    declare(model)
    before, totals = exact_logits(model, tmp_path / "before"), weight_totals(model)
    codes = {node.name: unpacked(node) for node in ternary_nodes(model)}
    report = run_pass(model, "compact_scales")
    assert DIGITS.code in {change.what.code for change in report.changes}
    nodes = ternary_nodes(model)
    assert {node.name for node in nodes} == codes.keys()
    assert all(node.attributes.get_int("base", 0) == 3 for node in nodes)
    assert weight_totals(model).parameters == totals.parameters
    assert all(port(node, "codes").shape[-1] == 52 for node in nodes)  # type: ignore[union-attr, index]
    declare(model)
    assert np.array_equal(exact_logits(model, tmp_path / "after"), before)
    for node in nodes:
        assert np.array_equal(unpacked(node), codes[node.name])
    run_pass(model, "widen_scales")
    run_pass(model, "unpack")
    assert not any(is_packed(node) for node in model.graph)
    run_pass(model, "lower", target="ort-cpu", instructions="avx2", activations="float32")
    declare(model)
    assert np.array_equal(exact_logits(model, tmp_path / "again"), before)


def test_products_on_gpus_read_codes_of_2_bits(tmp_path: Path) -> None:
    model, file = model_and_file(tmp_path, ("TQ1_0",))
    run_pass(model, "keep_codes", file=file)
    run_pass(model, "lower", target="ort-cuda")
    CompactScales()(model, make_context(task_of(model.graph), "ort-cuda"))
    assert ternary_nodes(model)
    assert not any(node.attributes.get_int("base", 0) for node in model.graph)


def ternary_nodes(model: ir.Model) -> list[ir.Node]:
    """Return the nodes that read packed codes of a table of three numbers."""
    nodes = [node for node in model.graph if reads_packed(node)]
    return [node for node in nodes if (table := port(node, "table")) is not None and table.shape == (3,)]


def unpacked(node: ir.Node) -> np.ndarray:
    """Return the codes that a node reads."""
    codes = port(node, "codes")
    assert codes is not None
    assert codes.const_value is not None
    rows, columns = (node.attributes.get_int(name, 0) for name in ("rows", "columns"))
    return unpack(codes.const_value.numpy(), rows, columns)


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
