from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from graphopt import verify
from graphopt.errors import VerificationError
from graphopt.kernels import check_kernels, quantized_products
from graphopt.passes.quantize_weights import LinearFormat, QuantizeWeights, QuantizeWeightsOptions
from graphopt.runtime import ACCURACY_LEVEL, open_session
from graphopt.verify import Verifier
from tests.graphs import residual_model, save


@pytest.fixture
def quantized() -> ir.Model:
    model = residual_model(width=32, inner=48)
    QuantizeWeights(QuantizeWeightsOptions(linear=LinearFormat(group=16), head=LinearFormat(group=16)))(model)
    return model


@pytest.mark.parametrize(("level", "activations"), [("0", "float32"), ("4", "int8")])
def test_activation_precision_is_read_from_what_onnxruntime_runs(
    quantized: ir.Model, tmp_path: Path, level: str, activations: str
) -> None:
    entries = {ACCURACY_LEVEL: level}
    report = check_kernels(quantized, Verifier(tmp_path, entries), entries)
    assert report.activations == (activations,)
    assert report.check.status == "measured"
    assert report.check.figures == {"quantized_products": 5, "fused_kernels": 5}


def test_a_layout_that_onnxruntime_does_not_fuse_is_refused(quantized: ir.Model, tmp_path: Path) -> None:
    # An app that also reads the dequantized weight keeps onnxruntime from fusing it away.
    product = quantized_products(quantized.graph)[1]
    quantized.graph.outputs.append(product.inputs[1])
    with pytest.raises(VerificationError, match=f"fuses 4 of 5 quantized products.*{product.name}"):
        check_kernels(quantized, Verifier(tmp_path, {}), {})


def test_a_model_that_does_not_fit_is_not_covered(
    quantized: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "available_memory", lambda: 10)
    verifier = Verifier(tmp_path, {})
    verifier.start(quantized)
    report = check_kernels(quantized, verifier, {})
    assert (report.check.status, report.activations) == ("not covered", ("unknown",))


def test_kernels_that_were_in_the_graph_before_are_not_taken_for_new_ones(tmp_path: Path) -> None:
    # onnxruntime's own optimized graph, as other tools hand out: its matrices are kernels already, the head is not.
    model = residual_model(width=32, inner=48)
    QuantizeWeights(QuantizeWeightsOptions(linear=LinearFormat(group=16), head=None))(model)
    open_session(save(model, tmp_path), optimized_to=tmp_path / "optimized.onnx")
    optimized = ir.load(tmp_path / "optimized.onnx")
    QuantizeWeights(QuantizeWeightsOptions(embedding=None, head=LinearFormat(group=16)))(optimized)
    report = check_kernels(optimized, Verifier(tmp_path, {}), {})
    assert report.check.figures == {"quantized_products": 1, "fused_kernels": 1}
