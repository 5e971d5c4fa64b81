"""BERT: norms with gains stand on the residual itself, so it stays; what lies between them is rotated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.analysis.bases.search import find_bases
from graphopt.artifact import artifact
from graphopt.graph.diagnostics import PassReport
from graphopt.passes.algebra.rotate import Rotate
from graphopt.verification.certificate.checker import check
from tests.families import VOCABULARY
from tests.graphs import relative, session
from tools.studies.families import ALL_ROTATIONS, Outcome, fold, outcomes

# Relative to the largest output: two layers in float32, every weight rounded once more; seen 1.4e-6.
FLOAT32 = 1e-5


@pytest.fixture
def bert(bert_artifact: Path) -> ir.Model:
    """An encoder with a norm on the residual itself, canonical and folded."""
    model = artifact.read(bert_artifact).model
    fold(model)
    return model


def bert_inputs() -> dict[str, np.ndarray]:
    mask = np.ones((2, 7), np.int64)
    mask[0, 4:] = 0
    ids = np.random.default_rng(0).integers(0, VOCABULARY, mask.shape)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(mask)}


def test_an_encoder_with_norms_on_its_residual_is_refused_there_and_rotated_elsewhere(
    bert: ir.Model, tmp_path: Path
) -> None:
    model, bases = bert.clone(), find_bases(bert.graph)
    report = Rotate(query_key="hadamard")(model).report
    found = outcomes(bases, model, report)
    assert found["value"] == Outcome(rotated=2)
    assert found["query_key"] == Outcome(rotated=2)
    # Each norm reads the residual in its coordinates, and makes the next one in them.
    residuals = [basis for basis in bases if basis.role == "residual"]
    norms = [node.name for node in bert.graph if node.op_type in ("LayerNormalization", "RMSNormalization")]
    assert len(norms) == 5
    for basis, maker, reader in zip(residuals, norms[:-1], norms[1:], strict=True):
        assert [(pin.node, pin.side) for pin in basis.pins] == [(maker, "made"), (reader, "observed")]
    reason = "LayerNormalization takes a mean over it, which fold_norms could not move into weights"
    assert found["residual"] == Outcome(refusals=[f"{reason} ({norm})" for norm in norms[1:]])
    agrees(bert, model, report, tmp_path)


def test_an_encoder_takes_rotations_at_run_time_in_front_of_its_weights(bert: ir.Model, tmp_path: Path) -> None:
    model, bases = bert.clone(), find_bases(bert.graph)
    report = ALL_ROTATIONS(model).report
    # Behind each of five norms, and in front of two down projections.
    assert outcomes(bases, model, report)["weight_input"] == Outcome(rotated=7, nodes=7)
    agrees(bert, model, report, tmp_path)


def agrees(before: ir.Model, after: ir.Model, report: PassReport, folder: Path) -> None:
    """Confirm that certificate and onnxruntime say the same function."""
    assert report.claims is not None
    assert check(before, after, report.claims).status == "proved"
    results = [
        session(model.clone(), folder / name).run(None, bert_inputs())
        for name, model in (("before", before), ("after", after))
    ]
    for old, new in zip(*results, strict=True):
        assert 0 < relative(old, new) <= FLOAT32
