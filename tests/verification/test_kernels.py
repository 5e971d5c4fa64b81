from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from graphopt.errors import VerificationError
from graphopt.ort import capacity as room
from graphopt.ort.session import ACCURACY_LEVEL, native_operators, open_session
from graphopt.ort.snapshots import Snapshots
from graphopt.passes.codes.quantize_weights import LinearFormat, QuantizeWeights
from graphopt.runtime_ops.library import PATH_VARIABLE
from graphopt.verification import kernels
from graphopt.verification.equivalence import Verifier
from graphopt.verification.kernels import check_kernels, quantized_products
from tests.graphs import residual_model, run_pass, save
from tests.native import needs_library


@pytest.fixture
def int4_model() -> ir.Model:
    model = residual_model(width=32, inner=48)
    QuantizeWeights(linear=LinearFormat(group=16), lm_head=LinearFormat(group=16))(model)
    return model


@pytest.mark.parametrize(("level", "activations"), [("0", "float32"), ("4", "int8")])
def test_activation_precision_is_read_from_what_onnxruntime_runs(
    int4_model: ir.Model, tmp_path: Path, level: str, activations: str
) -> None:
    entries = {ACCURACY_LEVEL: level}
    report = check_kernels(int4_model, Snapshots(tmp_path), entries)
    assert report.activations == (activations,)
    assert report.check.status == "measured"
    assert report.check.figures == {"quantized_products": 5, "fused_kernels": 5}


def test_a_layout_that_onnxruntime_does_not_fuse_is_refused(int4_model: ir.Model, tmp_path: Path) -> None:
    # An app that also reads the dequantized weight keeps onnxruntime from fusing it away.
    product = quantized_products(int4_model.graph)[1]
    int4_model.graph.outputs.append(product.inputs[1])
    with pytest.raises(VerificationError, match=f"fuses 4 of 5 quantized products.*{product.name}"):
        check_kernels(int4_model, Snapshots(tmp_path), {})


def test_a_model_that_does_not_fit_is_not_covered(
    int4_model: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "available_memory", lambda: 10)
    verifier = Verifier(tmp_path, {})
    verifier.start(int4_model)
    report = check_kernels(int4_model, verifier.snapshots, {}, verifier.why_not)
    assert (report.check.status, report.activations) == ("not covered", ("unknown",))


def test_kernels_that_were_in_the_graph_before_are_not_taken_for_new_ones(tmp_path: Path) -> None:
    # onnxruntime's own optimized graph, as other tools hand out: its matrices are kernels already, the head is not.
    model = residual_model(width=32, inner=48)
    QuantizeWeights(linear=LinearFormat(group=16), lm_head=None)(model)
    open_session(save(model, tmp_path), optimized_to=tmp_path / "optimized.onnx")
    ort_model = ir.load(tmp_path / "optimized.onnx")
    QuantizeWeights(embedding=None, lm_head=LinearFormat(group=16))(ort_model)
    report = check_kernels(ort_model, Snapshots(tmp_path), {})
    assert report.check.figures == {"quantized_products": 1, "fused_kernels": 1}


def packed_model(**settings: object) -> ir.Model:
    """Return a model of four products of FP6, one of int4, and of two that round their input per token if asked."""
    model = residual_model(width=32, inner=48)
    options = {"linear": LinearFormat(format="fp6-e2m3", group=16), "lm_head": LinearFormat(group=16), **settings}
    QuantizeWeights(**options)(model)  # type: ignore[arg-type]
    run_pass(model, "lower")
    return model


@needs_library
def test_products_of_ours_are_there_still_and_say_what_they_round_to(tmp_path: Path) -> None:
    entries = {ACCURACY_LEVEL: "4"}
    report = check_kernels(packed_model(activations="int16"), Snapshots(tmp_path), entries)
    assert report.activations == ("int16", "int8")
    assert {(product.operator, product.activations): product.count for product in report.products} == {
        ("MatMulNBits", "int8"): 1,
        ("MatMulTable", "int16"): 4,
    }
    assert "MatMulTable runs by graphopt's kernel, each node is there still" in str(report.check.reason)
    assert report.check.figures == {"quantized_products": 1, "fused_kernels": 1, "MatMulTable_nodes": 4}


def test_without_a_library_bodies_run_and_the_check_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH_VARIABLE, "")
    assert native_operators() == frozenset()
    model = packed_model()
    run_pass(model, "unpack")
    run_pass(model, "quantize_activations", bits=4)
    run_pass(model, "lower")
    report = check_kernels(model, Snapshots(tmp_path), {})
    assert "MatMulDynamic runs by the function body: no kernel here" in str(report.check.reason)
    assert {(product.operator, product.activations): product.count for product in report.products} == {
        ("MatMulNBits", "int8"): 1,
        ("MatMulDynamic", "int4 per token"): 4,
    }


def test_a_product_that_is_folded_to_floats_beside_the_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A library that says it has a kernel, and a graph in which the bodies ran all the same.
    monkeypatch.setenv(PATH_VARIABLE, "")
    monkeypatch.setattr(kernels, "native_operators", lambda: frozenset({"MatMulTable"}))
    with pytest.raises(VerificationError, match="0 of 4 nodes of MatMulTable by graphopt's kernel.*up0"):
        check_kernels(packed_model(), Snapshots(tmp_path), {})


def test_what_does_not_fit_is_not_covered_but_states_what_the_graph_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "available_memory", lambda: 10)
    model = packed_model()
    verifier = Verifier(tmp_path, {})
    verifier.start(model)
    report = check_kernels(model, verifier.snapshots, {}, verifier.why_not)
    assert {(product.operator, product.activations): product.count for product in report.products} == {
        ("MatMulNBits", "unknown"): 1,
        ("MatMulTable", "int8"): 4,
    }
