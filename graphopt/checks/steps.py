"""The passes of a recipe, one after the other: run, numbered, held to their phase, and checked.

`graphopt optimize` and `graphopt verify` share this loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from graphopt.checks.certificate.proof import prove
from graphopt.checks.equivalence import Verifier
from graphopt.facts import Check, PassReport
from graphopt.passes.base import Pass
from graphopt.passes.context import Surroundings
from graphopt.passes.phases import breaches, confirm
from graphopt.rotations.claims import Claims


@dataclass(frozen=True)
class Ran:
    """One pass that has just run.

    Attributes:
        step: the pass.
        before: the model in front of it.
        after: the model behind it, which the next pass goes on with.
        report: what it did, with the number of its run.
    """

    step: Pass[Any]
    before: ir.Model
    after: ir.Model
    report: PassReport


def run_passes(
    model: ir.Model,
    passes: Iterable[Pass[Any]],
    shared: Surroundings,
    *,
    earlier: Iterable[PassReport] = (),
    on_pass: Callable[[Pass[Any]], None],
) -> Iterator[Ran]:
    """Run ``passes`` on ``model`` in place, and yield each when it has run.

    Args:
        model: rewritten in place.
        passes: what to run, in order.
        shared: what they share.
        earlier: the reports of all passes that ran on the model before; runs of a pass are counted on from there.
        on_pass: called before each.

    Raises:
        VerificationError: a pass broke an invariant of its phase, see :data:`graphopt.passes.phases.INVARIANTS`.
        InputError: a pass cannot work on the model.
    """
    runs = Counter(report.name for report in earlier)
    for step in passes:
        on_pass(step)
        there, before = breaches(model, step.phase()), model.clone()
        report = step(model, shared).report
        confirm(model, step.name, step.phase(), there)
        runs[step.name] += 1
        report.run = runs[step.name]
        yield Ran(step, before, model, report)


def by_run(reports: Iterable[PassReport]) -> dict[tuple[str, int], PassReport]:
    """Return reports by pass and number of its run, counted from 1: those of an older graphopt are not numbered."""
    runs: Counter[str] = Counter()
    found = {}
    for report in reports:
        runs[report.name] += 1
        found[report.name, runs[report.name]] = report
    return found


def check_pass(
    ran: Ran,
    verifier: Verifier,
    claims: Claims | None,
    against: ir.Model | None = None,
    *,
    on_stage: Callable[[str], None],
) -> list[Check]:
    """Prove what a pass claims, and run the model behind it; return what came of both.

    Args:
        ran: the pass.
        verifier: has run the model in front of it.
        claims: what it claims to have done; ``None`` for nothing that could be proved.
        against: the model that is to fit the claims, if not the one behind the pass.
        on_stage: called when a stage begins.

    Raises:
        VerificationError: a check failed.
    """
    checks = []
    if claims is not None:
        on_stage(f"proving {ran.step.name}")
        checks.append(prove(ran.before, against or ran.after, claims, ran.step.name))
    on_stage(f"checking {ran.step.name}")
    checks.append(verifier.check(ran.after, ran.step.name, ran.report.effect))
    return [check.model_copy(update={"run": ran.report.run}) for check in checks]
