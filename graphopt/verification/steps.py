"""The passes of a recipe, one after the other: run, numbered, held to their phase, and checked.

`graphopt optimize` and `graphopt verify` share this loop.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import onnx_ir as ir

from graphopt.passes.phases import breaches, confirm
from graphopt.verification.proofs import PendingClaim, Proofs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from graphopt.graph.diagnostics import Check, PassReport
    from graphopt.numerics.rotations.claims import Claims
    from graphopt.passes.base import Pass
    from graphopt.passes.context import Context
    from graphopt.verification.equivalence import Verifier

Result = TypeVar("Result")


@dataclass(frozen=True)
class PassRun:
    """One pass that has just run.

    Attributes:
        step: the pass.
        before: the model in front of it.
        after: the model behind it, which the next pass goes on with.
        report: what it did, with the number of its run.
    """

    step: Pass
    before: ir.Model
    after: ir.Model
    report: PassReport


def run_passes(
    model: ir.Model,
    passes: Iterable[Pass],
    context: Context,
    *,
    earlier: Iterable[PassReport] = (),
    on_pass: Callable[[Pass], None],
) -> Iterator[PassRun]:
    """Run ``passes`` on ``model`` in place, and yield each when it has run.

    Args:
        model: rewritten in place.
        passes: what to run, in order.
        context: what they share.
        earlier: the reports of all passes that ran on the model before; runs of a pass are counted on from there.
        on_pass: called before each.

    Raises:
        VerificationError: a pass broke an invariant of its phase, see :data:`graphopt.passes.phases.INVARIANTS`.
        InputError: a pass cannot work on the model.
    """
    runs = Counter(report.name for report in earlier)
    for step in passes:
        on_pass(step)
        known_breaches, before = breaches(model, step.phase()), model.clone()
        report = step(model, context).report
        confirm(model, step.name, step.phase(), known_breaches)
        runs[step.name] += 1
        report.run = runs[step.name]
        yield PassRun(step, before, model, report)


def by_run(reports: Iterable[PassReport]) -> dict[tuple[str, int], PassReport]:
    """Return reports by pass and number of its run, counted from 1: those of an older graphopt are not numbered."""
    runs: Counter[str] = Counter()
    numbered_reports = {}
    for report in reports:
        runs[report.name] += 1
        numbered_reports[report.name, runs[report.name]] = report
    return numbered_reports


class Checks:
    """Proves what passes claim and runs the model behind them; exact passes that follow one another are run together.

    Use as a context manager, which ends the thread of the proofs.

    Args:
        verifier: has run the model in front of the first pass.
        on_stage: called when a stage begins.
    """

    def __init__(self, verifier: Verifier, on_stage: Callable[[str], None]) -> None:
        self._verifier, self._on_stage = verifier, on_stage
        self._checks_by_pass: list[list[Check]] = []
        # Exact passes that were not run yet, with the place of what is found of each.
        self._waiting: list[tuple[PassRun, list[Check]]] = []
        self._proofs = Proofs(on_stage)

    def __enter__(self) -> Checks:
        return self

    def __exit__(self, *error: object) -> None:
        self._proofs.__exit__(*error)

    def skip(self, run: PassRun) -> None:
        """Leave a pass that has just run unchecked."""
        self._proofs.begin(run.before)

    def check_before(self, step: Pass, model: ir.Model) -> None:
        """Run the exact passes so far where ``step`` may be lossy; ``model`` is the one in front of it.

        Raises:
            VerificationError: a check failed.
        """
        if step.effect == "lossy":
            self._run(model)

    def check_behind(self, run: PassRun, claims: Claims | None, against: ir.Model | None = None) -> None:
        """Take what a pass that has just run claims, to be proved, and run the model behind it unless it is exact.

        Args:
            run: the pass.
            claims: what it claims to have done; ``None`` for nothing that could be proved.
            against: the model that is to fit the claims, if not the one behind the pass.

        Raises:
            VerificationError: a check failed.
        """
        # Passes work in place: the model behind one stays what it is in the copy that was made in front of the next.
        self._proofs.begin(run.before)
        checks: list[Check] = []
        self._checks_by_pass.append(checks)
        name, effect = run.step.name, run.report.effect
        if claims is not None:
            # A proof stands in front of the run of the same pass.
            take = partial(self._add, checks, run, index=0)
            self._proofs.add(PendingClaim(name, claims, run.before, against, take))
        if effect == "exact":
            self._waiting.append((run, checks))
        else:
            self._run(run.before)
            self._on_stage(f"checking {name}")
            self._add(checks, run, self._or_disproved(run.after, lambda: self._verifier.check(run.after, name, effect)))

    def finish(self, model: ir.Model) -> list[Check]:
        """Run the exact passes that are left, behind which is ``model``, and return all checks pass by pass.

        Raises:
            VerificationError: a check failed.
        """
        self._run(model)
        self._proofs.confirm(model)
        return [check for checks in self._checks_by_pass for check in checks]

    def _or_disproved(self, model: ir.Model, run: Callable[[], Result]) -> Result:
        """Return what ``run`` returns; where it fails, a proof that fails says more, and is raised instead."""
        try:
            return run()
        except Exception:
            self._proofs.confirm(model)
            raise

    def _run(self, model: ir.Model) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        passes = [run for run, _ in waiting]
        names = [run.step.name for run in passes]
        if is_same_graph(passes[0].before, model):
            checks = [self._verifier.check_unchanged(model, name) for name in names]
        else:
            self._on_stage(f"checking {', '.join(names)}")
            # Passes work in place: the model behind one is what was copied in front of the next.
            models = [*(run.before for run in passes[1:]), model]
            pairs = list(zip(names, models, strict=True))
            checks = self._or_disproved(model, lambda: self._verifier.check_together(pairs))
        for (run, pass_checks), check in zip(waiting, checks, strict=True):
            self._add(pass_checks, run, check)

    def _add(self, checks: list[Check], run: PassRun, check: Check, index: int | None = None) -> None:
        checks.insert(len(checks) if index is None else index, check.model_copy(update={"run": run.report.run}))


def is_same_graph(before: ir.Model, after: ir.Model) -> bool:
    """Return whether two models have the same nodes between the same ports, with the same functions and weights.

    Weights are the same where they are one tensor, as those of a model and its copy are; nothing is read. What is
    inside attributes that are graphs is not compared: nodes with such an attribute count as different.
    """
    return all(
        first == second
        for first, second in itertools.zip_longest(_describe(before), _describe(after), fillvalue=object())
    )


def _describe(model: ir.Model) -> Iterator[object]:
    graph = model.graph
    yield model.opset_imports, list(model.functions)
    for port in (*graph.inputs, *graph.outputs):
        yield port.name, port.dtype, port.shape
    for name, value in graph.initializers.items():
        yield name, id(value.const_value)
    for body in (graph, *model.functions.values()):
        for node in body:
            attributes = {name: _value_of(attribute) for name, attribute in node.attributes.items()}
            ports = [[value and value.name for value in values] for values in (node.inputs, node.outputs)]
            yield node.op_identifier(), ports, attributes


def _value_of(attribute: ir.Attr) -> object:
    plain = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS, ir.AttributeType.TENSOR, ir.AttributeType.TENSORS)
    return id(attribute.value) if attribute.type in plain else (attribute.type, attribute.value)
