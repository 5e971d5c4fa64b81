from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from graphopt import verify
from graphopt.errors import VerificationError
from graphopt.kernels import check_kernels, quantized_products
from graphopt.passes.quantize_weights import LinearFormat, QuantizeWeights, QuantizeWeightsOptions
from graphopt.runtime import ACCURACY_LEVEL
from graphopt.verify import Verifier
from tests.graphs import residual_model


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
    # A product whose codes are shared with another one is not fused by onnxruntime: it would dequantize at every step.
    first, second = quantized_products(quantized.graph)[:2]
    identity = ir.node("Identity", [first.inputs[1]], name="in_between")
    identity.outputs[0].name = "in_between.out"
    quantized.graph.insert_before(first, identity)
    first.replace_input_with(1, identity.outputs[0])
    quantized.graph.outputs.append(second.inputs[1])
    with pytest.raises(VerificationError, match="fuses .* of .* quantized products"):
        check_kernels(quantized, Verifier(tmp_path, {}), {})


def test_a_model_that_does_not_fit_is_not_covered(
    quantized: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "available_memory", lambda: 10)
    verifier = Verifier(tmp_path, {})
    verifier.start(quantized)
    report = check_kernels(quantized, verifier, {})
    assert (report.check.status, report.activations) == ("not covered", ("unknown",))
