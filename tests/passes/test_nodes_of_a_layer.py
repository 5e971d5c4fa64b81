"""What a token costs the host of a GPU: nodes of a layer that is lowered for ``ort-cuda``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt import optimize
from graphopt.artifact.artifact import MODEL
from graphopt.inference.session import load
from graphopt.passes.base import Pass
from graphopt.passes.lower.fuse_gates import FuseGates
from graphopt.passes.lower.fuse_residuals import FuseResiduals
from graphopt.passes.lower.fuse_rotary import FuseRotary

FUSIONS: tuple[type[Pass], ...] = (FuseGates, FuseResiduals, FuseRotary)

LAYER = {
    "MatMulTable": 4,  # queries, keys and values; the output; gate and up; down
    "SplitRotary": 1,
    "KVAttention": 1,
    "SwiGLU": 1,
    "SkipSimplifiedLayerNormalization": 2,
}
"""Nodes of a layer; onnxruntime-genai's builder makes 11 of them (``python tools/bench/gpu_model.py --peer int4``)."""


def kinds_of_layer(folder: Path) -> Counter[str]:
    """Return the nodes between two attentions, which are those of one layer."""
    kinds = [node.op_type for node in ir.load(folder / MODEL).graph]
    first, second = (index for index, kind in enumerate(kinds) if kind == "KVAttention")
    # sines and cosines of positions are made once, beside the first layer
    return Counter(kinds[first:second])


@pytest.mark.parametrize("float16", [False, True])
@pytest.mark.usefixtures("interpreted_gpu")
def test_a_layer_has_nine_nodes_and_logits_stay(
    float16: bool, llama_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"target": "ort-cuda", "float16": float16, "run": False}
    fused = optimize(llama_artifact, "int4-rtn", tmp_path / "fused", **options)  # type: ignore[arg-type]
    assert kinds_of_layer(tmp_path / "fused") == LAYER
    skips = {report.name: [str(skip.reason) for skip in report.skips] for report in fused.manifest.passes}
    assert [len(skips[each.name]) for each in FUSIONS] == [0, 1, 0]
    assert "is no sum of two tensors" in skips["fuse_residuals"][0]  # the first norm reads the embedding
    for each in FUSIONS:
        monkeypatch.setattr(each, "targets", ())
    optimize(llama_artifact, "int4-rtn", tmp_path / "plain", **options)  # type: ignore[arg-type]
    assert kinds_of_layer(tmp_path / "plain").total() == 16
    ids = np.random.default_rng(0).integers(0, 32, (1, 12))
    expected = load(tmp_path / "plain").logits(ids)
    # Sums of float32 in another order. float16 rounds 40 numbers of two layers that follow one another, to 2^-11 each.
    bound = 40 * 2.0**-11 if float16 else 1e-5
    for device in ("cpu", "cuda"):
        logits = load(tmp_path / "fused", device=device).logits(ids)  # type: ignore[arg-type]
        assert np.abs(logits - expected).max() <= bound * np.abs(expected).max()
    bodies = load(tmp_path / "fused", native=False).logits(ids)
    assert np.abs(bodies - expected).max() <= bound * np.abs(expected).max()
