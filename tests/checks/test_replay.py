"""`graphopt verify`: what it confirms, and every way in which an artifact can be other than it says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.artifact import DATA, MODEL
from graphopt.checks.equivalence import TOLERANCE
from graphopt.checks.replay import verify
from graphopt.errors import InputError, VerificationError
from graphopt.manifest import MANIFEST, read_manifest
from graphopt.pipeline import optimize


@pytest.fixture(scope="module")
def rotated(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("proof") / "rotated"
    optimize(llama_artifact, "rotate-online", output)
    return output


@pytest.fixture(scope="module")
def quantized(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("proof") / "quantized"
    optimize(llama_artifact, "rotate-int4", output)
    return output


def edited(folder: Path, copy: Path, tensor: str, change: float) -> Path:
    """Copy an artifact with one number of one weight changed."""
    shutil.copytree(folder, copy)
    stored = ir.load(copy / MODEL).graph.initializers[tensor].const_value
    assert isinstance(stored, ir.ExternalTensor)
    assert stored.offset is not None
    number = np.memmap(copy / DATA, stored.dtype.numpy(), "r+", offset=stored.offset, shape=(1,))
    number += number.dtype.type(change)
    number.flush()
    return copy


def test_the_manifest_holds_the_certificate(rotated: Path) -> None:
    manifest = read_manifest(rotated)
    (check,) = [check for check in manifest.checks if check.name == "certificate"]
    assert (check.status, check.after) == ("proved", "rotate")
    # 14 matrices of two layers, head and embedding; q and k are read by the residual's rotation as well
    assert check.figures["fused_weights"] == 16
    assert check.figures["largest_share_of_rounding"] <= 1
    assert check.findings
    assert all(finding.status == "proved" for finding in check.findings)
    assert manifest.passes[-1].claims is not None


def test_a_rotation_is_proved_again_from_the_two_folders(llama_artifact: Path, rotated: Path) -> None:
    proof = verify(llama_artifact, rotated)
    assert [(check.name, check.status) for check in proof.checks] == [("certificate", "proved"), ("logits", "measured")]
    assert proof.checks[-1].figures["largest_change"] < TOLERANCE


def test_a_lossy_recipe_is_replayed_to_the_last_number(llama_artifact: Path, quantized: Path) -> None:
    proof = verify(llama_artifact, quantized)
    statuses = [(check.name, check.status) for check in proof.checks]
    assert statuses == [("certificate", "proved"), ("replay", "proved"), ("logits", "measured")]


def test_without_running_the_proof_still_holds(llama_artifact: Path, rotated: Path) -> None:
    logits = verify(llama_artifact, rotated, run=False).checks[-1]
    assert logits.status == "not covered"
    assert "asked not to run" in logits.reason


@pytest.mark.parametrize(
    "tensor",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ],
)
def test_one_changed_number_is_found_and_named(
    llama_artifact: Path, rotated: Path, tmp_path: Path, tensor: str
) -> None:
    # 1e-3 is far above rounding (weights are about 0.1) and far below what the logits would show at the bound of 1e-4
    copy = edited(rotated, tmp_path / "copy", tensor, 1e-3)
    with pytest.raises(VerificationError, match=tensor):
        verify(llama_artifact, copy, run=False)


def test_a_changed_scale_is_found_and_named(llama_artifact: Path, quantized: Path, tmp_path: Path) -> None:
    tensor = "model.layers.0.mlp.up_proj.weight.scales"
    copy = edited(quantized, tmp_path / "copy", tensor, 1e-4)
    with pytest.raises(VerificationError, match=tensor):
        verify(llama_artifact, copy, run=False)


def test_a_claim_that_was_changed_is_refused(llama_artifact: Path, rotated: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(rotated, tmp_path / "copy")
    manifest = json.loads((copy / MANIFEST).read_text())
    claims = manifest["passes"][-1]["claims"]
    name = next(name for name, claim in claims["rotations"].items() if claim["seed"] is not None)
    claims["rotations"][name]["seed"] += 1
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(VerificationError, match="certificate of rotate does not hold"):
        verify(llama_artifact, copy, run=False)


def test_another_model_before_is_refused(make_artifact, rotated: Path) -> None:
    with pytest.raises(VerificationError, match="certificate of rotate does not hold"):
        verify(make_artifact("qwen2"), rotated, run=False)


def test_what_was_never_optimized_is_refused(llama_artifact: Path) -> None:
    with pytest.raises(InputError, match="no recipe"):
        verify(llama_artifact, llama_artifact)


def test_the_wrong_order_is_refused(llama_artifact: Path, rotated: Path, quantized: Path) -> None:
    with pytest.raises(InputError, match="which is not what its recipe rotate-int4 does after"):
        verify(rotated, quantized)


def test_another_body_of_our_operator_is_not_taken_for_it(llama_artifact: Path, rotated: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(rotated, tmp_path / "copy")
    model = ir.load(copy / MODEL)
    body = model.functions[("ai.graphopt", "Hadamard", "")]
    square_root = next(node for node in body if node.op_type == "Sqrt")
    square_root.op_type = "Abs"  # type: ignore[misc]
    ir.save(model, copy / MODEL)
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["files"] = {}
    (copy / MANIFEST).write_text(json.dumps(manifest))
    check = verify(llama_artifact, copy, run=False).checks[0]
    assert check.status == "not covered"
    (finding,) = [finding for finding in check.findings if finding.status != "proved"]
    assert finding.node == "ai.graphopt::Hadamard"
    # and run, it is found out
    with pytest.raises(VerificationError, match="moved the logits"):
        verify(llama_artifact, copy)
