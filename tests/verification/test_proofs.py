"""Claims are proved beside the runs of the passes that follow, and a proof that fails is what is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from graphopt.errors import VerificationError
from graphopt.graph.diagnostics import Check, PassReport
from graphopt.numerics.rotations.claims import Claims
from graphopt.verification import proofs
from graphopt.verification.equivalence import Verifier
from graphopt.verification.proofs import PendingClaim, Proofs
from graphopt.verification.steps import Checks, PassRun
from tests.facts import SENTENCE
from tests.graphs import residual_model
from tests.verification.test_steps import Rename, scale_head

CLAIMS = Claims()


@pytest.fixture
def proved_claims(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ir.Model, str]]:
    """Prove everything but what a pass called ``wrong`` claims; return what was proved, of which model and where."""
    calls = []

    def prove(before: ir.Model, after: ir.Model, claims: Claims, name: str) -> Check:
        calls.append((name, after, threading.current_thread().name))
        if name == "wrong":
            raise VerificationError("the certificate of wrong does not hold")
        return Check(name="certificate", after=name, status="proved", reason=SENTENCE(text="tried"))

    monkeypatch.setattr(proofs, "prove", prove)
    return calls


def test_a_proof_is_of_the_copy_in_front_of_the_next_pass(proved_claims: list[Any]) -> None:
    models, checks_of_proofs, stages = [residual_model() for _ in range(4)], [], []
    with Proofs(stages.append) as proofs_running:
        for number, against in ((0, None), (1, models[3])):
            proofs_running.begin(models[number])  # nothing waits the first time
            proofs_running.add(PendingClaim(str(number), CLAIMS, models[number], against, checks_of_proofs.append))
        proofs_running.confirm(models[2])
    assert [(name, after) for name, after, _ in proved_claims] == [("0", models[1]), ("1", models[3])]
    assert all(thread.startswith("proof") for _, _, thread in proved_claims)
    assert [check.after for check in checks_of_proofs] == ["0", "1"]
    assert set(stages) <= {"proving 0", "proving 1"}


@pytest.fixture
def checks(tmp_path: Path) -> Iterator[Checks]:
    verifier = Verifier(tmp_path, {})
    verifier.start(residual_model())
    with Checks(verifier, lambda stage: None) as checks_running:
        yield checks_running


def run_of(name: str, factor: float) -> PassRun:
    """Return the run of a pass that says that it is exact, and scales logits."""
    step, model = scale_head(factor, name), residual_model()
    report = step(model.clone()).report if factor == 1 else PassReport(name=name, effect="exact")
    after = model.clone()
    if factor != 1:
        step(after)
    return PassRun(step, model, after, report.model_copy(update={"run": 1}))


def test_a_proof_that_fails_is_told_rather_than_the_run_that_fails_too(
    checks: Checks, proved_claims: list[Any]
) -> None:
    wrong = run_of("wrong", 1.5)
    checks.check_behind(wrong, CLAIMS)
    with pytest.raises(VerificationError, match="the certificate of wrong does not hold"):
        checks.finish(wrong.after)
    assert [name for name, *_ in proved_claims] == ["wrong"]


def test_where_the_proof_holds_the_run_that_fails_is_told(checks: Checks, proved_claims: list[Any]) -> None:
    moved_run = run_of("moved", 1.5)
    checks.check_behind(moved_run, CLAIMS)
    with pytest.raises(VerificationError, match="the pass moved is exact, but it moved the logits"):
        checks.finish(moved_run.after)
    assert [name for name, *_ in proved_claims] == ["moved"]


def test_a_proof_stands_in_front_of_the_run_of_its_pass(checks: Checks, proved_claims: list[Any]) -> None:
    first, second = Rename(), Rename()
    models = [residual_model() for _ in range(3)]
    for number, (step, claims) in enumerate(((first, CLAIMS), (second, None))):
        report = PassReport(name=f"{number}", effect="exact", run=1)
        checks.check_behind(PassRun(step, models[number], models[number + 1], report), claims)
    results = checks.finish(models[2])
    assert [check.name for check in results] == ["certificate", "logits", "logits"]
