"""Codes that only the file holds are decoded by nodes that onnxruntime computes once; what kernels read stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import graphopt
from graphopt.analysis.structure.constant_parts import constant_results
from graphopt.analysis.structure.cost import storage_formats, weight_totals
from graphopt.ort.session import open_session
from tests.graphs import run_pass, session
from tests.tasks.graph import graphs

IMAGES = np.random.default_rng(7).standard_normal((2, 3, 16, 16)).astype(np.float32)


@pytest.mark.parametrize("options", [{}, {"format": "int4", "group": 16}])
def test_weights_of_convolutions_of_floats_are_decoded_when_the_file_is_opened(
    options: dict[str, object], tmp_path: Path
) -> None:
    model = ir.load(graphs.convolutions(tmp_path / "model.onnx"))
    coded_weights = run_pass(model, "quantize_convolutions", **options).changes
    totals, formats = weight_totals(model), storage_formats(model)
    (before,) = session(model, tmp_path / "before").run(["logits"], {"images": IMAGES})
    report = run_pass(model, "decode_at_load")
    assert len(report.changes) == len(coded_weights) > 0
    assert (weight_totals(model), storage_formats(model)) == (totals, formats)
    assert not constant_results(model.graph)  # so that `fold_constants` does not store floats again
    after = session(model, tmp_path / "after")
    # Of weights that are constants onnxruntime takes another kernel, which adds in another order.
    np.testing.assert_allclose(after.run(["logits"], {"images": IMAGES})[0], before, rtol=1e-5, atol=1e-5)
    open_session(tmp_path / "after" / "model.onnx", optimized_to=tmp_path / "optimized.onnx")
    running = {node.op_type for node in ir.load(tmp_path / "optimized.onnx").graph}
    assert not running & {"Cast", "Mul", "DequantizeLinear"}


def test_what_kernels_read_as_codes_stays(tmp_path: Path) -> None:
    file = graphs.convolutions(tmp_path / "model.onnx")
    np.savez(tmp_path / "images.npz", images=IMAGES[:, None])
    manifest = graphopt.optimize(file, "int8", tmp_path / "int8", inputs=tmp_path / "images.npz").manifest
    (report,) = [report for report in manifest.passes if report.name == "decode_at_load"]
    assert [str(change.what) for change in report.changes] == []
