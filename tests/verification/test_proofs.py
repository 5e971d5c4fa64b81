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
def proved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ir.Model, str]]:
    """Prove everything but what a pass called ``wrong`` claims; return what was proved, of which model and where."""
    found = []

    def prove(before: ir.Model, after: ir.Model, claims: Claims, name: str) -> Check:
        found.append((name, after, threading.current_thread().name))
        if name == "wrong":
            raise VerificationError("the certificate of wrong does not hold")
        return Check(name="certificate", after=name, status="proved", reason=SENTENCE(text="tried"))

    monkeypatch.setattr(proofs, "prove", prove)
    return found


def test_a_proof_is_of_the_copy_in_front_of_the_next_pass(proved: list[Any]) -> None:
    models, taken, stages = [residual_model() for _ in range(4)], [], []
    with Proofs(stages.append) as beside:
        for number, against in ((0, None), (1, models[3])):
            beside.begin(models[number])  # nothing waits the first time
            beside.add(PendingClaim(str(number), CLAIMS, models[number], against, taken.append))
        beside.confirm(models[2])
    assert [(name, after) for name, after, _ in proved] == [("0", models[1]), ("1", models[3])]
    assert all(thread.startswith("proof") for _, _, thread in proved)
    assert [check.after for check in taken] == ["0", "1"]
    assert set(stages) <= {"proving 0", "proving 1"}


@pytest.fixture
def checks(tmp_path: Path) -> Iterator[Checks]:
    verifier = Verifier(tmp_path, {})
    verifier.start(residual_model())
    with Checks(verifier, lambda stage: None) as made:
        yield made


def ran(name: str, factor: float) -> PassRun:
    """Return the run of a pass that says that it is exact, and scales logits."""
    step, model = scale_head(factor, name), residual_model()
    report = step(model.clone()).report if factor == 1 else PassReport(name=name, effect="exact")
    after = model.clone()
    if factor != 1:
        step(after)
    return PassRun(step, model, after, report.model_copy(update={"run": 1}))


def test_a_proof_that_fails_is_told_rather_than_the_run_that_fails_too(checks: Checks, proved: list[Any]) -> None:
    wrong = ran("wrong", 1.5)
    checks.check_behind(wrong, CLAIMS)
    with pytest.raises(VerificationError, match="the certificate of wrong does not hold"):
        checks.finish(wrong.after)
    assert [name for name, *_ in proved] == ["wrong"]


def test_where_the_proof_holds_the_run_that_fails_is_told(checks: Checks, proved: list[Any]) -> None:
    moved = ran("moved", 1.5)
    checks.check_behind(moved, CLAIMS)
    with pytest.raises(VerificationError, match="the pass moved is exact, but it moved the logits"):
        checks.finish(moved.after)
    assert [name for name, *_ in proved] == ["moved"]


def test_a_proof_stands_in_front_of_the_run_of_its_pass(checks: Checks, proved: list[Any]) -> None:
    first, second = Rename(), Rename()
    models = [residual_model() for _ in range(3)]
    for number, (step, claims) in enumerate(((first, CLAIMS), (second, None))):
        report = PassReport(name=f"{number}", effect="exact", run=1)
        checks.check_behind(PassRun(step, models[number], models[number + 1], report), claims)
    found = checks.finish(models[2])
    assert [check.name for check in found] == ["certificate", "logits", "logits"]
