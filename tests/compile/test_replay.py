"""`graphopt verify`: what it confirms, and every way in which an artifact can be other than it says."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphopt.artifact.artifact import DATA, MODEL, read
from graphopt.artifact.manifest import MANIFEST, read_manifest
from graphopt.compile.pipeline import optimize
from graphopt.compile.replay import verify
from graphopt.errors import InputError, VerificationError
from graphopt.passes.recipe import load_recipe
from graphopt.verification.equivalence import TOLERANCE


@pytest.fixture(scope="module")
def rotated_artifact(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("proof") / "rotated"
    optimize(llama_artifact, "rotate-online", output)
    return output


@pytest.fixture(scope="module")
def int4_artifact(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("proof") / "quantized"
    optimize(llama_artifact, "rotate-int4-rtn", output)
    return output


def agreeing(folder: Path) -> Path:
    """Set sizes and hashes in the manifest to those of the files, as whoever changed them on purpose would."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def edit_weight(folder: Path, copy: Path, tensor: str, change: float) -> Path:
    """Copy an artifact with one number of one weight changed, and the hash with it."""
    shutil.copytree(folder, copy)
    external = ir.load(copy / MODEL).graph.initializers[tensor].const_value
    assert isinstance(external, ir.ExternalTensor)
    assert external.offset is not None
    number = np.memmap(copy / DATA, external.dtype.numpy(), "r+", offset=external.offset, shape=(1,))
    number += number.dtype.type(change)
    number.flush()
    return agreeing(copy)


def with_model(folder: Path, copy: Path, change: Callable[[onnx.ModelProto], object]) -> Path:
    """Copy an artifact with its ``model.onnx`` changed, and the hash with it."""
    shutil.copytree(folder, copy)
    proto = onnx.load(copy / MODEL, load_external_data=False)
    change(proto)
    (copy / MODEL).write_bytes(proto.SerializeToString())
    return agreeing(copy)


def test_the_manifest_holds_the_certificate(rotated_artifact: Path) -> None:
    manifest = read_manifest(rotated_artifact)
    (check,) = [check for check in manifest.checks if check.name == "certificate"]
    assert (check.status, check.after) == ("proved", "rotate")
    # 14 matrices of two layers, head and embedding; q and k are read by the residual's rotation as well
    assert check.figures["fused_weights"] == 16
    assert check.figures["largest_share_of_rounding"] <= 1
    assert check.findings
    assert all(finding.status == "proved" for finding in check.findings)
    assert manifest.passes[-2].claims is not None


def test_a_rotation_is_proved_again_from_the_two_folders(llama_artifact: Path, rotated_artifact: Path) -> None:
    proof = verify(llama_artifact, rotated_artifact)
    statuses = [(check.name, check.status) for check in proof.checks]
    assert statuses == [("certificate", "proved"), ("replay", "proved"), ("logits", "measured")]
    (manifest,) = proof.checks[1].findings
    assert manifest.status == "not covered"
    assert "passes.*.seconds (how long a pass took)" in str(manifest.reason)
    assert "recipe.*" not in str(manifest.reason)
    assert proof.checks[-1].figures["largest_change"] < TOLERANCE


def test_a_lossy_recipe_is_replayed_to_the_last_number(llama_artifact: Path, int4_artifact: Path) -> None:
    proof = verify(llama_artifact, int4_artifact)
    statuses = [(check.name, check.status) for check in proof.checks]
    assert statuses == [("certificate", "proved"), ("replay", "proved"), ("logits", "measured")]


def test_a_step_that_comes_twice_is_replayed_by_its_run(llama_artifact: Path, tmp_path: Path) -> None:
    recipe = load_recipe("rotate")
    first = next(step for step in recipe.steps if step.name == "rotate")
    second_rotation = first.model_copy(update={"seed": 7})
    steps = [
        step_or_copy for step in recipe.steps for step_or_copy in ([step, second_rotation] if step is first else [step])
    ]
    optimize(llama_artifact, recipe.model_copy(update={"steps": tuple(steps)}), tmp_path / "twice")
    reports = [report for report in read_manifest(tmp_path / "twice").passes if report.name == "rotate"]
    assert [report.run for report in reports] == [1, 2]
    assert reports[0].claims != reports[1].claims
    proof = verify(llama_artifact, tmp_path / "twice", run=False)
    assert [(check.name, check.status, check.run) for check in proof.checks[:2]] == [
        ("certificate", "proved", 1),
        ("certificate", "proved", 2),
    ]


def test_without_running_the_proof_still_holds(llama_artifact: Path, rotated_artifact: Path) -> None:
    logits = verify(llama_artifact, rotated_artifact, run=False).checks[-1]
    assert logits.status == "not covered"
    assert "asked not to run" in str(logits.reason)


@pytest.mark.parametrize(
    "tensor",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ],
)
def test_one_changed_number_is_found_and_named(
    llama_artifact: Path, rotated_artifact: Path, tmp_path: Path, tensor: str
) -> None:
    # 1e-3 is far above rounding (weights are about 0.1) and far below what the logits would show at the bound of 1e-4
    copy = edit_weight(rotated_artifact, tmp_path / "copy", tensor, 1e-3)
    with pytest.raises(VerificationError, match=tensor):
        verify(llama_artifact, copy, run=False)


def test_a_changed_scale_is_found_and_named(llama_artifact: Path, int4_artifact: Path, tmp_path: Path) -> None:
    tensor = "model.layers.0.mlp.up_proj.weight.scales"
    copy = edit_weight(int4_artifact, tmp_path / "copy", tensor, 1e-2)
    with pytest.raises(VerificationError, match=tensor):
        verify(llama_artifact, copy, run=False)


def test_a_claim_that_was_changed_is_refused(llama_artifact: Path, rotated_artifact: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(rotated_artifact, tmp_path / "copy")
    manifest = json.loads((copy / MANIFEST).read_text())
    claims = manifest["passes"][-2]["claims"]
    name = next(name for name, claim in claims["rotations"].items() if claim["seed"] is not None)
    claims["rotations"][name]["seed"] += 1
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(VerificationError, match="certificate of rotate does not hold"):
        verify(llama_artifact, copy, run=False)


def test_another_model_before_is_refused(make_artifact, rotated_artifact: Path) -> None:
    with pytest.raises(VerificationError, match="certificate of rotate does not hold"):
        verify(make_artifact("qwen2"), rotated_artifact, run=False)


def test_what_was_never_optimized_is_refused(llama_artifact: Path) -> None:
    with pytest.raises(InputError, match="no recipe"):
        verify(llama_artifact, llama_artifact)


def test_the_wrong_order_is_refused(llama_artifact: Path, rotated_artifact: Path, int4_artifact: Path) -> None:
    with pytest.raises(InputError, match="which is not what its recipe rotate-int4-rtn does after"):
        verify(rotated_artifact, int4_artifact)


def other_operator(proto: onnx.ModelProto) -> None:
    body = next(function for function in proto.functions if function.name == "Hadamard")
    next(node for node in body.node if node.op_type == "Sqrt").op_type = "Abs"


FAULTS: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "operator of a body": (other_operator, r"functions\[Hadamard\]\.node\[.*\]\.op_type is 'Abs'"),
    "opset": (
        lambda proto: setattr(proto.opset_import[0], "version", 24),
        "version 23 of the operators of ONNX became 24",
    ),
    "one function more": (lambda proto: proto.functions.add(name="extra", domain="x"), "body of the operator x::extra"),
    "dimension of a port": (
        lambda proto: setattr(proto.graph.output[0].type.tensor_type.shape.dim[0], "dim_param", "rows"),
        r"graph\.output\[logits\].*dim_param is 'rows'",
    ),
    "name of a port": (lambda proto: setattr(proto.graph.input[-1], "name", "other"), "no such input.*other"),
    "version of the IR": (lambda proto: setattr(proto, "ir_version", 9), "ir_version is 9"),
    "metadata": (lambda proto: proto.graph.node[0].metadata_props.add(key="by", value="me"), "metadata_props"),
    "a comment": (lambda proto: setattr(proto.graph.node[0], "doc_string", "hello"), "doc_string is 'hello'"),
    "an unknown field": (lambda proto: proto.graph.MergeFromString(b"\xf8\x7f\x05"), "unknown fields is number 2047"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_changed_part_of_the_model_is_found_and_named(
    llama_artifact: Path, rotated_artifact: Path, tmp_path: Path, name: str
) -> None:
    change, message = FAULTS[name]
    copy = with_model(rotated_artifact, tmp_path / "copy", change)
    with pytest.raises(VerificationError, match=message):
        verify(llama_artifact, copy, run=False)


def test_files_beside_the_model_are_compared(llama_artifact: Path, rotated_artifact: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json", "genai_config.json"):
        copy = shutil.copytree(rotated_artifact, tmp_path / name)
        with (copy / name).open("a") as stream:
            stream.write(" ")
        with pytest.raises(VerificationError, match="where its manifest says"):
            verify(llama_artifact, copy, run=False)
        with pytest.raises(VerificationError, match=f"writes another file.*{name}"):
            verify(llama_artifact, agreeing(copy), run=False)


def test_a_file_too_many_or_too_few_is_refused(llama_artifact: Path, rotated_artifact: Path, tmp_path: Path) -> None:
    longer = shutil.copytree(rotated_artifact, tmp_path / "more")
    (longer / "chat_template.jinja").write_text("x")
    with pytest.raises(VerificationError, match="does not list this file.*chat_template"):
        verify(llama_artifact, longer, run=False)
    manifest = json.loads((longer / MANIFEST).read_text())
    manifest["files"]["chat_template.jinja"] = {"bytes": 0, "sha256": ""}
    (longer / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(VerificationError, match="writes no such file.*chat_template"):
        verify(llama_artifact, agreeing(longer), run=False)
    fewer = shutil.copytree(rotated_artifact, tmp_path / "fewer")
    (fewer / "tokenizer.json").unlink()
    manifest["files"] = {name: {"bytes": 0, "sha256": ""} for name in sorted(f.name for f in fewer.iterdir())}
    del manifest["files"][MANIFEST]
    (fewer / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(VerificationError, match="this file is missing.*tokenizer.json"):
        verify(llama_artifact, agreeing(fewer), run=False)


def test_an_artifact_in_parts_runs_and_is_verified(llama_artifact: Path, int4_artifact: Path, tmp_path: Path) -> None:
    optimize(llama_artifact, "rotate-int4-rtn", tmp_path / "parts", quality_tokens=0, part_size=10_000)
    assert (tmp_path / "parts" / f"{DATA}.1").is_file()
    checks = verify(llama_artifact, tmp_path / "parts").checks
    assert {check.status for check in checks} <= {"proved", "measured"}
    whole, parts = (
        [(name, value.const_value.tobytes()) for name, value in read(folder).model.graph.initializers.items()]
        for folder in (int4_artifact, tmp_path / "parts")
    )
    assert whole == parts
