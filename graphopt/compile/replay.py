"""Before and after, once more: what an artifact's manifest says was proved, checked again from the two files alone.

The passes between the two are run again on BEFORE. Where a rotation is the last of them, the checker compares it with
what AFTER really holds; where lossy passes follow, the certificate is made anew on the way, and AFTER must be what the
recipe makes of BEFORE, every stored number of it.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_ir.passes.common import NameFixPass
from pydantic import BaseModel

from graphopt.analysis.structure.heads import ORIGIN
from graphopt.artifact import artifact as artifacts
from graphopt.artifact.artifact import Artifact
from graphopt.artifact.manifest import MANIFEST
from graphopt.compile.calibration.statistics import calibration_of
from graphopt.compile.manifest import manifest_of
from graphopt.compile.same_manifest import confirm_manifest, left_out, recorded_kernels
from graphopt.errors import InputError, VerificationError
from graphopt.graph.diagnostics import Check, Finding, PassReport, Rule
from graphopt.passes.codes.quantize_weights import MEASURED
from graphopt.passes.context import Statistics, Surroundings
from graphopt.passes.recipe import Recipe
from graphopt.tasks import TASKS
from graphopt.util.progress import Progress, silent
from graphopt.verification.companions import confirm_companions
from graphopt.verification.equivalence import Verifier, context_of
from graphopt.verification.kernels import KernelReport, check_kernels, own_nodes, quantized_products
from graphopt.verification.same_model import confirm_model
from graphopt.verification.steps import Checks, by_run, run_passes
from graphopt.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx_ir as ir

    from graphopt.passes.base import Pass

SAME_AGAIN = Rule(
    "replay.same",
    "the recipe, run again on the model before, makes this one: every node, function, port and stored number, every "
    "other field of the model, the manifest, every file beside them, and nothing else",
    rounded="; {rounded} tensors differ by rounding, which the certificate covers",
)
SAME_UP_TO_NAMES = Rule(
    "replay.same-up-to-names",
    "the recipe, run again on the model before, computes what this one computes: every operator that an output needs, "
    "every function, port and stored number, up to names and metadata",
)
RECORDED = Rule(
    "replay.recorded",
    "of the manifest these are not compared: the figures of checks that ran the model, the name and the description of "
    "the recipe, {fields}",
)
OTHER_NAMES = Rule(
    "replay.other-names",
    "names, metadata, comments, types of inner values, the order of nodes and functions, the producer of the model and "
    "nodes that no output needs are not compared: graphopt {version} wrote the artifact; {first}",
)


class Proof(BaseModel):
    """What was found, check by check; none of them failed."""

    checks: list[Check]


def verify(
    before: str | Path,
    after: str | Path,
    *,
    run: bool = True,
    statistics: str | Path | None = None,
    on_stage: Progress = silent,
) -> Proof:
    """Check that ``after`` computes what ``before`` computes, as far as its recipe says it should.

    Args:
        before: the artifact, or ``.onnx`` file, that ``after`` was made from.
        after: an artifact that :func:`graphopt.optimize` wrote.
        run: whether to run both as well, where they fit into memory.
        statistics: the folder in which statistics of the model are kept, for a recipe that needs them; without it they
            are collected again.
        on_stage: called when a stage begins, with how many are done.

    Raises:
        InputError: one cannot be read, ``after`` does not say that it was made from ``before``, or statistics that it
            was made with cannot be had.
        VerificationError: a check failed; names the first node and tensor at fault.
    """
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        return _verify(Path(before), Path(after), Path(statistics or folder), run=run, on_stage=on_stage)


def _verify(before: Path, after: Path, statistics: Path, *, run: bool, on_stage: Progress) -> Proof:
    first, last = artifacts.read(before), artifacts.read(after)
    recipe = _recipe_between(first, last, after)
    for folder in (before, after):
        _confirm_hashes(folder)
    version = last.manifest.versions.get("graphopt")
    older = None if version == VERSION else str(version)
    # An older graphopt did these steps while it read a file, and recorded none.
    recipe = recipe.importing(first.model.graph) if older else recipe
    passes = recipe.passes()
    recorded = by_run(last.manifest.passes)
    changed = [report for report in last.manifest.passes[len(first.manifest.passes) :] if report.changes]
    total = len(passes) + 1
    graph = first.model.clone()
    graph.metadata_props[ORIGIN] = artifacts.origin_of(first)
    reports: list[PassReport] = []
    unread = Verifier(after, recipe.session_entries(), run=False)
    unread.start(graph)
    calibration = calibration_of(first, recipe, statistics, unread.runner if run else None, on_stage)
    positions = first.manifest.model.max_positions
    shared = Surroundings(TASKS[first.manifest.task], recipe.target, unread.runner, Statistics(calibration), positions)

    def begin(step: Pass[Any]) -> None:
        on_stage(f"running {step.name} again", len(reports), total)

    with Checks(unread, lambda stage: on_stage(stage, len(reports), total)) as made_of:
        for ran in run_passes(graph, passes, shared, earlier=first.manifest.passes, on_pass=begin):
            report = recorded.get((ran.step.name, ran.report.run))
            if report is None:
                # An older graphopt did not record steps that this one adds by itself.
                made_of.skip(ran)
                continue
            _confirm_statistics(ran.report, report, after)
            reports.append(ran.report)
            # The names of an older version, which lead from node to node, may be others than this one gives.
            final = report is changed[-1] if changed and not older else False
            made_of.behind(ran, report.claims, last.model if final else None)
        made_checks = made_of.finish(graph)
    checks = [check for check in made_checks if check.name == "certificate"]
    NameFixPass()(graph)
    on_stage("comparing all that is in the files", total - 1, total)
    certified = bool(changed) and changed[-1].claims is not None and checks[-1].status == "proved"
    fields = left_out(first.manifest, older=older is not None)
    checks.append(_confirm_replay(graph, after, fields, rounding_proved=certified and not older, older=older))
    kernels: KernelReport | None = None
    if quantized_products(graph.graph) or own_nodes(graph.graph):
        kernels = check_kernels(graph, unread.snapshots, recipe.session_entries(), unread.why_not)
        made_checks.append(kernels.check)
        kernels = recorded_kernels(kernels, last.manifest.precision, graph, recipe, after / MANIFEST)
    made = Artifact(graph, manifest_of(first, graph, recipe, reports, made_checks, kernels), first.companions)
    made.manifest = made.manifest.model_copy(update={"notes": confirm_companions(made, after)})
    confirm_manifest(made.manifest, last.manifest, after / MANIFEST, first.manifest, older=older is not None)
    on_stage("running both models", total - 1, total)
    with tempfile.TemporaryDirectory(prefix="graphopt-") as temporary:
        # with the bodies that the file carries: our own kernels would not show that one of them is another
        context = context_of(passes, positions)
        verifier = Verifier(Path(temporary), recipe.session_entries(), run=run, native=False, context=context)
        verifier.start(first.model.clone())
        lossy = any(report.effect == "lossy" for report in changed)
        checks.append(verifier.check(last.model.clone(), "the recipe", "lossy" if lossy else "exact"))
    return Proof(checks=checks)


def _recipe_between(first: Artifact, last: Artifact, file: Path) -> Recipe:
    """Return the recipe that made ``last`` of ``first``."""
    done, all_done = ([report.name for report in made.manifest.passes] for made in (first, last))
    if last.manifest.recipe is None:
        raise InputError(
            "its manifest has no recipe, so it does not say how it was made",
            file=file,
            remedy="give BEFORE and then AFTER, a folder that `graphopt optimize` wrote",
        )
    recipe = Recipe.recorded(last.manifest.recipe)
    if [*done, *(step["step"] for step in last.manifest.recipe["steps"])] != all_done:
        raise InputError(
            f"it went through {', '.join(all_done) or 'no pass'}, which is not what its recipe {recipe.name} does "
            f"after {', '.join(done) or 'no pass'}",
            file=file,
            remedy="give the artifact that it was made from as BEFORE",
        )
    return recipe


def _confirm_statistics(made: PassReport, recorded: PassReport, file: Path) -> None:
    """Refuse to compare codes that were chosen by other statistics than can be had here."""
    ours, theirs = (
        {change.what.figures["digest"] for change in report.changes if change.what.code == MEASURED.code}
        for report in (made, recorded)
    )
    if ours != theirs:
        raise InputError(
            "its codes were chosen by statistics of activations that come out differently here, so nothing can be "
            "proved: another text, another version of Python, onnxruntime or NumPy, or another processor",
            file=file,
            node=made.name,
            remedy="give the folder that was collected where it was made: --statistics FOLDER",
        )


def _confirm_hashes(folder: Path) -> None:
    """Confirm that the files of ``folder`` are those of its manifest, where it has one."""
    if not (folder / MANIFEST).is_file():
        return
    try:
        artifacts.verify_files(folder)
    except InputError as error:
        raise VerificationError(error.what, file=error.file, remedy=error.remedy) from error


def _confirm_replay(
    made: ir.Model, folder: Path, fields: Mapping[str, str], *, rounding_proved: bool, older: str | None
) -> Check:
    """Confirm that the recipe, run again, made what is stored.

    Args:
        made: what it makes.
        folder: the artifact.
        fields: the fields of the manifest that are not compared, and why.
        rounding_proved: see :func:`confirm_model`.
        older: another version of graphopt that wrote the artifact; it may have given other names than this one.
    """
    recorded = RECORDED(fields=[f"{pattern} ({why})" for pattern, why in fields.items()])
    findings = [Finding(node="manifest", tensor=None, status="not covered", reason=recorded)]
    try:
        extent = confirm_model(made, folder, rounding_proved=rounding_proved)
    except VerificationError as error:
        if older is None:
            raise
        try:
            extent = confirm_model(made, folder, rounding_proved=rounding_proved, up_to_names=True)
        except VerificationError as other:
            other.add_note(f"the artifact was written by graphopt {older}, this is {VERSION}")
            raise
        reason = OTHER_NAMES(version=older, first=error.what)
        findings.append(Finding(node="model", tensor=None, status="not covered", reason=reason))
    return Check(
        name="replay",
        after="the recipe",
        status="proved",
        reason=SAME_UP_TO_NAMES() if len(findings) > 1 else SAME_AGAIN(rounded=extent.rounded),
        figures=dataclasses.asdict(extent),
        findings=findings,
    )
