"""Before and after, once more: what an artifact's manifest says was proved, checked again from the two files alone.

The passes between the two are run again on BEFORE. Where a rotation is the last of them, the checker compares it with
what AFTER really holds; where lossy passes follow, the certificate is made anew on the way, and AFTER must be what the
recipe makes of BEFORE, every stored number of it.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ir.passes.common import NameFixPass
from pydantic import BaseModel

from graphopt.analysis.structure.cost import weight_totals
from graphopt.artifact import artifact as artifacts
from graphopt.artifact.artifact import Artifact
from graphopt.artifact.manifest import MANIFEST
from graphopt.compile.compilation import Compilation, Run
from graphopt.compile.same_manifest import confirm_manifest, left_out, recorded_kernels
from graphopt.errors import InputError, VerificationError
from graphopt.graph.diagnostics import Check, Finding, PassReport, Rule
from graphopt.passes.cache import quantize_kv
from graphopt.passes.codes import quantize_weights
from graphopt.util.progress import Progress, silent
from graphopt.verification.companions import confirm_companions
from graphopt.verification.same_model import confirm_model
from graphopt.verification.steps import Checks, by_run

if TYPE_CHECKING:
    from graphopt.passes.base import Pass
    from graphopt.verification.equivalence import Verifier

SAME_AGAIN = Rule(
    "replay.same",
    "the recipe, run again on the model before, makes this one: every node, function, port and stored number, every "
    "other field of the model, the manifest, every file beside them, and nothing else",
    rounded="; {rounded} tensors differ by rounding, which the certificate covers",
)
NOT_COMPARED = Rule(
    "replay.recorded",
    "of the manifest these are not compared: the figures of checks that ran the model, the name and the description of "
    "the recipe, {fields}",
)


class Proof(BaseModel):
    """What was found, check by check; none of them failed."""

    checks: list[Check]


def verify(
    before: str | Path | Artifact,
    after: str | Path,
    *,
    run: Run = True,
    statistics: str | Path | None = None,
    inputs: str | Path | None = None,
    on_stage: Progress = silent,
) -> Proof:
    """Check that ``after`` computes what ``before`` computes, as far as its recipe says it should.

    Args:
        before: the artifact, or ``.onnx`` file, that ``after`` was made from, or what :func:`graphopt.read` made of it.
        after: an artifact that :func:`graphopt.optimize` wrote.
        run: whether to run both as well, where they fit into memory. ``"parts"``: not, but parts of the model before
            run one after the other where statistics are collected.
        statistics: the folder in which statistics of the model are kept, for a recipe that needs them; without it they
            are collected again.
        inputs: of a graph that reads no text: what it was calibrated and compared on, where that lies elsewhere now.
        on_stage: called when a stage begins, with how many are done.

    Raises:
        InputError: one cannot be read, ``after`` does not say that it was made from ``before``, or statistics that it
            was made with cannot be had.
        VerificationError: a check failed; names the first node and tensor at fault.
    """
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        replay = Replay(before, Path(after), Path(folder), statistics, run=run, inputs=inputs, on_stage=on_stage)
        names = replay.confirm_parts()
        checks = replay.checks()
    for name in names:
        part = before.parts[name] if isinstance(before, Artifact) else Path(before) / name
        proof = verify(part, Path(after) / name, run=run, statistics=statistics, on_stage=on_stage)
        checks += [check.model_copy(update={"after": f"{name}: {check.after}"}) for check in proof.checks]
    return Proof(checks=checks)


class Replay:
    """The recipe of an artifact, run again on the model before.

    Args:
        before: what ``after`` was made from.
        after: an artifact that :func:`graphopt.optimize` wrote.
        folder: an empty one, for weights and models while they run.
        statistics: as for :func:`verify`.
        run: as for :func:`verify`.
        inputs: as for :func:`verify`.
        on_stage: called when a stage begins.
    """

    def __init__(
        self,
        before: str | Path | Artifact,
        after: Path,
        folder: Path,
        statistics: str | Path | None,
        *,
        run: Run,
        inputs: str | Path | None,
        on_stage: Progress,
    ) -> None:
        self._folder, self._file, self._on_stage = folder, after, on_stage
        self._before = before if isinstance(before, Artifact) else artifacts.read(before)
        self._after = artifacts.read(after)
        recipe = self._after.manifest.recipe
        if recipe is None:
            raise InputError(
                "its manifest has no recipe, so it does not say how it was made",
                file=after,
                remedy="give BEFORE and then AFTER, a folder that `graphopt optimize` wrote",
            )
        self._compilation = Compilation(
            self._before,
            recipe,
            work=folder,
            run=run,
            statistics=statistics,
            inputs=None if inputs is None else Path(inputs),
            on_stage=on_stage,
        )
        self._confirm_passes()
        for file in (self._before.path, after):
            if file is not None:
                _confirm_hashes(file)
        self._total = len(self._compilation.passes) + 1
        earlier, reports = len(self._before.manifest.passes), self._after.manifest.passes
        self._changing_reports = [report for report in reports[earlier:] if report.changes]

    def _confirm_passes(self) -> None:
        """Refuse an artifact that other passes made than those of its recipe, behind those of the model before."""
        first, last = ([run.name for run in artifact.manifest.passes] for artifact in (self._before, self._after))
        recipe = self._compilation.recipe
        if [*first, *(step.name for step in recipe.steps)] != last:
            raise InputError(
                f"it went through {', '.join(last) or 'no pass'}, which is not what its recipe {recipe.name} does "
                f"after {', '.join(first) or 'no pass'}",
                file=self._file,
                remedy="give the artifact that it was made from as BEFORE",
            )

    def confirm_parts(self) -> list[str]:
        """Return the names of the other graphs of the artifact.

        Raises:
            VerificationError: the model before has others.
        """
        names, names_before = sorted(self._after.parts), sorted(self._before.parts)
        if names != names_before:
            raise VerificationError(
                f"it has the graphs {', '.join(names) or 'of one model'}, and the model before has "
                f"{', '.join(names_before) or 'no other'}",
                file=self._file,
                remedy="give the artifact that it was made from as BEFORE",
            )
        return names

    def checks(self) -> list[Check]:
        """Return what was found, check by check.

        Raises:
            InputError: statistics that the artifact was made with cannot be had.
            VerificationError: a check failed.
        """
        compilation = self._compilation
        unread = compilation.verifier(self._folder, run=False)
        unread.start(compilation.model)
        checks_again = self._run_again(unread)
        checks = [check for check in checks_again if check.name == "certificate"]
        NameFixPass()(compilation.model)
        self._on_stage("comparing all that is in the files", self._total - 1, self._total)
        is_certified = (
            bool(self._changing_reports)
            and self._changing_reports[-1].claims is not None
            and checks[-1].status == "proved"
        )
        checks.append(self._confirm_model(is_certified))
        self._confirm_manifest(unread, checks_again)
        self._on_stage("running both models", self._total - 1, self._total)
        checks.append(self._run_both())
        return checks

    def _run_again(self, verifier: Verifier) -> list[Check]:
        """Run the recipe again; where a claim comes last, it is compared with what the artifact really holds."""
        compilation, recorded_reports = self._compilation, by_run(self._after.manifest.passes)

        def say(stage: str) -> None:
            self._on_stage(stage, len(compilation.reports), self._total)

        def begin(step: Pass) -> None:
            if step.phase() == "lower":  # it reads scales: what is rounded for them is rounded once
                compilation.settle()
            say(f"running {step.name} again")

        with Checks(verifier, say) as checks:
            for run in compilation.apply(compilation.passes, begin):
                report = recorded_reports[run.step.name, run.report.run]
                _confirm_statistics(run.report, report, self._file)
                is_last = bool(self._changing_reports) and report is self._changing_reports[-1]
                checks.check_behind(run, report.claims, self._after.model if is_last else None)
            return checks.finish(compilation.model)

    def _confirm_model(self, rounding_proved: bool) -> Check:
        """Confirm that the recipe, run again, made the model that is stored; see :func:`confirm_model`."""
        fields = left_out(self._before.manifest)
        reason = NOT_COMPARED(fields=[f"{pattern} ({explanation})" for pattern, explanation in fields.items()])
        extent = confirm_model(self._compilation.model, self._file, rounding_proved=rounding_proved)
        return Check(
            name="replay",
            after="the recipe",
            status="proved",
            reason=SAME_AGAIN(rounded=extent.rounded_tensors),
            figures=dataclasses.asdict(extent),
            findings=[Finding(node="manifest", tensor=None, status="not covered", reason=reason)],
        )

    def _confirm_manifest(self, unread: Verifier, checks: list[Check]) -> None:
        """Confirm that the artifact says of itself what the recipe, run again, says, and has the files beside it."""
        compilation, stored_manifest, file = self._compilation, self._after.manifest, self._file / MANIFEST
        kernels = None
        if compilation.has_kernels():
            report = compilation.check_kernels(unread)
            checks = [*checks, report.check]
            kernels = recorded_kernels(report, stored_manifest.precision, compilation.model, compilation.recipe, file)
        if weight_totals(compilation.model) != stored_manifest.weights:
            compilation.settle()  # tensors that were made apart count once where they come out as the same bytes
        artifact = compilation.artifact(compilation.recipe, checks, kernels)
        artifact.parts = self._after.parts
        notes, parts = confirm_companions(artifact, self._file), dict.fromkeys(compilation.parts, "")
        manifest = artifact.manifest.model_copy(update={"notes": notes, "parts": parts})
        confirm_manifest(manifest, stored_manifest, file, self._before.manifest)

    def _run_both(self) -> Check:
        """Run both models with the bodies that the files carry: our own kernels would not show that one was changed."""
        folder = self._folder / "run"
        folder.mkdir()
        verifier = self._compilation.verifier(folder, native=False)
        verifier.start(self._before.model.clone())
        is_lossy = any(report.effect == "lossy" for report in self._changing_reports)
        return verifier.check(self._after.model.clone(), "the recipe", "lossy" if is_lossy else "exact")


def _confirm_statistics(report: PassReport, recorded_report: PassReport, file: Path) -> None:
    """Refuse to compare codes that were chosen by other statistics than can be had here."""
    codes = {rule.code for rule in (quantize_weights.STATISTICS, quantize_kv.STATISTICS)}
    digests_here, recorded_digests = (
        {change.what.figures["digest"] for change in pass_report.changes if change.what.code in codes}
        for pass_report in (report, recorded_report)
    )
    if digests_here != recorded_digests:
        raise InputError(
            "its codes were chosen by statistics of activations that come out differently here, so nothing can be "
            "proved: another text, another version of Python, onnxruntime or NumPy, or another processor",
            file=file,
            node=report.name,
            remedy="give the folder that was collected where it was made: --statistics FOLDER",
        )


def _confirm_hashes(folder: Path) -> None:
    """Confirm that the files of ``folder`` are those of its manifest, where it has one."""
    if not (folder / MANIFEST).is_file():
        return
    try:
        artifacts.verify_files(folder)
    except InputError as error:
        raise VerificationError(error.message, file=error.file, remedy=error.remedy) from error
