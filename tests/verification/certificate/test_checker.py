"""Right rotations are proved, wrong entries are found, and claims are checked before they are believed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.numerics.rotations.claims import Claims, RotationClaim, TensorClaim
from graphopt.numerics.rotations.hadamard import hadamard
from graphopt.verification.certificate import constants
from graphopt.verification.certificate.checker import check
from tests.graphs import logits, relative, residual_model, session
from tests.verification.certificate.rotated_models import (
    WIDTH,
    attention_model,
    claim,
    dense,
    edit,
    first_fault,
    insert_hadamard,
    interleaved_model,
    rotated_attention,
    rotated_residual,
    rotation_of,
    without,
)

rotations = st.builds(
    rotation_of, st.sampled_from([12, 16, 20, 24]), st.sampled_from(["hadamard", "random"]), st.integers(0, 1000)
)


@given(
    rotation=rotations,
    layers=st.integers(1, 3),
    biases=st.booleans(),
    multiplier=st.sampled_from([None, 3.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_any_rotation_of_a_residual_stream_is_proved(
    rotation: RotationClaim, layers: int, biases: bool, multiplier: float | None, seed: int
) -> None:
    before, after, claims = rotated_residual(rotation, layers=layers, biases=biases, multiplier=multiplier, seed=seed)
    certificate = check(before, after, claims, seed=seed)
    assert certificate.status == "proved", first_fault(certificate)
    assert certificate.weights == 2 + 2 * layers + (layers if biases else 0)
    assert 0 < certificate.largest_error_ratio <= 1
    assert certificate.rotations == 1
    assert certificate.nodes == len(after.graph)


def test_any_number_of_threads_says_the_same_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings of matrices come late where threads compare them."""
    before, after, claims = rotated_residual(layers=3, biases=True)
    edit(after, "down1.weight", lambda weight: weight * 1.01)
    findings_by_run = []
    for threads in (1, 3):
        monkeypatch.setattr(constants, "processors", lambda count=threads: count)
        certificate = check(before, after, claims)
        findings_by_run.append([(finding.tensor, finding.status, finding.figures) for finding in certificate.findings])
    assert findings_by_run[0] == findings_by_run[1]
    assert {status for _, status, _ in findings_by_run[0]} == {"proved", "failed"}


@given(rotation=rotations, biases=st.booleans(), seed=st.integers(0, 1000), data=st.data())
@settings(max_examples=40)
def test_one_entry_of_one_weight_off_by_a_thousandth_is_found(
    rotation: RotationClaim, biases: bool, seed: int, data: st.DataObject
) -> None:
    before, after, claims = rotated_residual(rotation, biases=biases, seed=seed)
    names = sorted(name for name, value in after.graph.initializers.items() if not name.endswith("gain"))
    name = data.draw(st.sampled_from(names))
    array = after.graph.initializers[name].const_value.numpy()  # type: ignore[union-attr]
    rows = array.reshape(-1, array.shape[-1])
    # An entry of ordinary size: what is off by less than its row's rounding cannot be seen, nor would it matter.
    row = data.draw(st.integers(0, len(rows) - 1))
    column = int(np.abs(rows[row]).argmax())
    new_rows = rows.astype(np.float64)
    new_rows[row, column] *= 1.001
    edit(after, name, lambda _: new_rows.reshape(array.shape))
    certificate = check(before, after, claims, seed=seed)
    assert first_fault(certificate).tensor == name
    assert sum(finding.status == "failed" for finding in certificate.findings) == 1


def test_all_rotations_at_once_are_proved() -> None:
    certificate = check(*rotated_attention())
    assert certificate.status == "proved", first_fault(certificate)
    # the residual stream, the values, keys and the MLP's inside
    assert certificate.rotations == 4
    assert certificate.weights == 7
    pairs = [finding for finding in certificate.findings if "H H^T" in str(finding.reason)]
    assert [finding.node for finding in pairs] == ["query.turned", "key.turned", "gated.turned"]


def test_what_is_proved_is_seen_at_run_time(tmp_path: Path) -> None:
    before, after, claims = rotated_attention(online=False)
    assert check(before, after, claims).status == "proved"
    empty = np.zeros((2, 2, 0, WIDTH), np.float32)
    ids = np.random.default_rng(0).integers(0, 24, (2, 7))
    results = []
    for name, model in (("before", before), ("after", after)):
        run = session(model, tmp_path / name).run
        past = run(None, {"input_ids": ids[:, :4], "past_key_values.0.key": empty, "past_key_values.0.value": empty})
        feeds = dict(zip(["past_key_values.0.key", "past_key_values.0.value"], past[1:], strict=True))
        results.append(run(["logits"], {"input_ids": ids[:, 4:], **feeds})[0])
    # float32: every weight is rounded once more
    assert relative(*results) < 5e-6


def test_the_same_graph_needs_no_claims() -> None:
    model = attention_model()
    certificate = check(model, model.clone(), Claims())
    assert certificate.status == "proved"
    assert certificate.weights == 0
    assert certificate.findings == []


def test_a_second_rotation_of_a_rotated_graph_is_proved() -> None:
    _, rotated_model, _ = rotated_residual()
    second_model = rotated_model.clone()
    Q = dense(rotation_of(16, "random", 9))
    for name in ("table", "down0.weight", "down1.weight"):
        edit(second_model, name, lambda W: W @ Q)
    for name in ("up0.weight", "up1.weight", "head.weight"):
        edit(second_model, name, lambda W: Q.T @ W)
    tensors = tuple(claim(f"{name}.out", "again") for name in ("embedding", "down0", "down1"))
    claims = Claims(rotations={"again": rotation_of(16, "random", 9)}, tensors=tensors)
    assert check(rotated_model, second_model, claims).status == "proved"


def test_hadamard_nodes_that_were_there_before_are_nodes_like_others() -> None:
    before = attention_model()
    insert_hadamard(before, "gated", 12, 1, "turned")
    assert check(before, before.clone(), Claims()).status == "proved"
    after = before.clone()
    after.graph.initializers["turned.left"].const_value = ir.tensor(-hadamard(12))
    assert first_fault(check(before, after, Claims())).tensor == "turned.left"


def test_a_rotation_and_its_inverse_cancel() -> None:
    before, after = attention_model(), attention_model()
    insert_hadamard(after, "gated", 2, 2, "there")
    insert_hadamard(after, "there", 2, 2, "again")
    certificate = check(before, after, Claims())
    assert certificate.status == "proved"
    assert certificate.rotations == 1


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (TensorClaim(tensor="embedding.out", axis=3, rotation="r"), "axis 3, whose size is not known"),
        (TensorClaim(tensor="embedding.out", axis=0, rotation="r"), "axis 0, whose size is not known"),
        (TensorClaim(tensor="embedding.out", axis=-1, rotation="r", start=1), "leave the 16 coordinates"),
        (TensorClaim(tensor="embedding.out", axis=-1, rotation="r", copies=9**9), "no part of the 16 coordinates"),
        (TensorClaim(tensor="embedding.out", axis=-1, rotation="other"), "no rotation is called other"),
        (TensorClaim(tensor="embedding.out", axis=-1, rotation="half", copies=2, stride=4), "overlap"),
        (TensorClaim(tensor="embedding.out", axis=-1, rotation="odd"), "do not divide"),
        (TensorClaim(tensor="embedding.out", axis=-1, rotation="none"), "no construction"),
        (TensorClaim(tensor="nowhere", axis=-1, rotation="r"), "no computed tensor has this name"),
        (TensorClaim(tensor="norm0.out", axis=-1, rotation="r"), "not come out in the coordinates that are claimed"),
    ],
)
def test_a_claim_that_cannot_be_is_a_finding(wrong: TensorClaim, reason: str) -> None:
    model = residual_model(gains=False)
    rotation_by_name = {
        "r": rotation_of(16, "hadamard", 0),
        "half": RotationClaim(kind="hadamard", width=8, factors=(8,)),
        "odd": RotationClaim(kind="hadamard", width=16, factors=(5,)),
        "none": RotationClaim(kind="hadamard", width=6, factors=(6,)),
    }
    certificate = check(model, model.clone(), Claims(rotations=rotation_by_name, tensors=(wrong,)))
    assert reason in str(first_fault(certificate).reason)


def test_claims_of_the_same_coordinates_are_a_finding() -> None:
    before, after, claims = rotated_residual()
    repeated_claims = (*claims.tensors, claim("embedding.out", "r"))
    fault = first_fault(check(before, after, claims.model_copy(update={"tensors": repeated_claims})))
    assert "about the same coordinates" in str(fault.reason)


def test_only_the_first_twenty_failures_are_listed() -> None:
    before, after = (residual_model(layers=12, gains=False, seed=seed) for seed in (0, 1))
    certificate = check(before, after, Claims())
    failures = [finding for finding in certificate.findings if finding.status == "failed"]
    assert len(failures) == 21
    assert "6 failures from here on" in str(failures[-1].reason)


def test_a_weight_whose_rounding_is_not_known_is_not_covered() -> None:
    before, after, claims = rotated_residual()
    for model in (before, after):
        weight = model.graph.initializers["down0.weight"]
        assert weight.const_value is not None
        weight.const_value = ir.tensor(weight.const_value.numpy().astype(ir.DataType.FLOAT8E4M3FN.numpy()))
    certificate = check(before, after, claims)
    assert certificate.status == "not covered"
    (finding,) = (finding for finding in certificate.findings if finding.status == "not covered")
    assert finding.tensor == "down0.weight"


def test_heads_of_a_packed_projection_are_counted_head_by_head() -> None:
    """[heads, 3, width] packed as in GPT-NeoX: the values of a head are every third block."""
    before, after = (interleaved_model() for _ in range(2))
    R = dense(rotation_of(12, "random", 2))
    maps = np.eye(3 * 3 * 12)
    for head in range(3):
        block = slice((3 * head + 2) * 12, (3 * head + 3) * 12)
        maps[block, block] = R
    edit(after, "packed.weight", lambda W: W @ maps)
    edit(after, "output.weight", lambda W: np.kron(np.eye(3), R.T) @ W)
    rotation = {"v": rotation_of(12, "random", 2)}
    right = Claims(rotations=rotation, tensors=(claim("packed.out", "v", start=24, copies=3, stride=36),))
    assert check(before, after, right).status == "proved"
    wrong = Claims(rotations=rotation, tensors=(claim("packed.out", "v", start=24, copies=3, stride=24),))
    assert first_fault(check(before, after, wrong)).tensor == "packed.weight"


def test_a_rotation_that_mixes_heads_does_not_pass_attention() -> None:
    before, after, claims = rotated_attention(online=False)
    wide_rotation = rotation_of(16, "random", 3)
    claims = without(claims, "packed.out")
    tensors = (*claims.tensors, claim("packed.out", "all", start=0))
    claims = Claims(rotations={**claims.rotations, "all": wide_rotation}, tensors=tensors)
    reasons = [str(finding.reason) for finding in check(before, after, claims).findings if finding.node == "attention"]
    assert any("mixes heads" in reason for reason in reasons)


def test_weights_are_read_again_from_their_files(tmp_path: Path) -> None:
    before, after, claims = rotated_residual()
    for name, model in (("before", before), ("after", after)):
        (tmp_path / name).mkdir()
        ir.save(model, tmp_path / name / "m.onnx", external_data="m.data", size_threshold_bytes=0)
    models = [ir.load(tmp_path / name / "m.onnx") for name in ("before", "after")]
    assert check(*models, claims).status == "proved"
    tensors = [value.const_value for model in models for value in model.graph.initializers.values()]
    assert all(isinstance(tensor, ir.ExternalTensor) and tensor.raw is None for tensor in tensors)
    assert relative(logits(before, tmp_path / "a"), logits(after, tmp_path / "b")) < 5e-6
