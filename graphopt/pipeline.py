"""A recipe and a model in, an optimized model out: every pass is run, checked, and written down."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from onnx_ir.passes.common import NameFixPass

from graphopt import artifact as artifacts
from graphopt.analysis.cost import weight_totals
from graphopt.analysis.heads import ORIGIN
from graphopt.artifact import Artifact
from graphopt.checks.equivalence import Verifier, context_of, prove
from graphopt.checks.kernels import KernelReport, check_kernels, own_nodes, quantized_products
from graphopt.facts import Check, PassReport
from graphopt.manifest import Manifest, installed_versions
from graphopt.notes import OF_GRAPH, notes_of, precision_of
from graphopt.passes.lower.lower import Target
from graphopt.progress import Progress, silent
from graphopt.recipe import Recipe, load_recipe
from graphopt.weights import check_finite


def optimize(
    model: str | Path | Artifact,
    recipe: str | Path | Recipe = "rotate-int4",
    output: str | Path | None = None,
    *,
    target: Target | None = None,
    last_logits: bool = False,
    float16: bool = False,
    overwrite: bool = False,
    run: bool = True,
    on_stage: Progress = silent,
) -> Artifact:
    """Apply ``recipe`` to ``model``, check it pass by pass, and write it.

    Args:
        model: an artifact folder, an ``.onnx`` file, or what :func:`graphopt.read` made of one. It is not changed.
        recipe: the name of a preset, a YAML file, or a recipe.
        output: the folder to write; ``None`` keeps the result in memory and in a temporary folder that lives as long.
        target: what the model is to run on: the step ``lower`` of the recipe is for that, and is added where there is
            none, for any but ``portable`` with ``merge_products`` behind it. ``None`` leaves the recipe as it is.
        last_logits: add the step ``last_logits``: enough to generate, not to score a given text.
        float16: add the step ``float16``: compute in float16.
        overwrite: whether an artifact at ``output`` may be replaced.
        run: whether to run the model before and after each pass, where it fits into memory. Without it exact passes
            are still proved where they can be; the rest is reported as not covered.
        on_stage: called when a stage begins, with how many are done.

    Returns:
        The optimized model with its manifest. What each pass changed, and what it left alone and why, is in
        ``manifest.passes``; what was proved or measured after it in ``manifest.checks``.

    Raises:
        InputError: the model, the recipe or the output cannot be used.
        VerificationError: a check failed; nothing was written.
    """
    chosen = load_recipe(recipe)
    chosen = chosen.adding("last_logits") if last_logits else chosen
    chosen = chosen if target is None else chosen.lowered(target)
    chosen = chosen.adding("float16") if float16 else chosen
    if output is not None:
        artifacts.check_output(Path(output), overwrite=overwrite)
    source = model if isinstance(model, Artifact) else artifacts.read(model)
    folder = tempfile.TemporaryDirectory(prefix="graphopt-")
    graph = source.model.clone()

    passes = chosen.passes()
    total = len(passes) + 3
    on_stage("reading the weights", 0, total)
    check_finite(graph, None if isinstance(model, Artifact) else model)
    graph.metadata_props[ORIGIN] = artifacts.origin_of(source)
    on_stage("running the model as it is", 1, total)
    context = context_of(passes, source.manifest.model.max_positions)
    verifier = Verifier(Path(folder.name), chosen.session_entries(), run=run, context=context)
    verifier.start(graph)

    reports: list[PassReport] = []
    checks: list[Check] = []
    runs = Counter(report.name for report in source.manifest.passes)
    for done, step in enumerate(passes, start=2):
        on_stage(step.name, done, total)
        before = graph.clone()
        report = step(graph).report
        runs[step.name] += 1
        report.run = runs[step.name]
        reports.append(report)
        if report.claims is not None:
            on_stage(f"proving {step.name}", done, total)
            checks.append(_of_run(report, prove(before, graph, report.claims, step.name)))
        on_stage(f"checking {step.name}", done, total)
        checks.append(_of_run(report, verifier.check(graph, step.name, step.effect)))

    NameFixPass()(graph)
    kernels: KernelReport | None = None
    if quantized_products(graph.graph) or own_nodes(graph.graph):
        on_stage("reading the graph that onnxruntime runs", total - 1, total)
        kernels = check_kernels(graph, verifier, chosen.session_entries())
        checks.append(kernels.check)

    manifest = Manifest(
        source=source.manifest.source,
        task=source.manifest.task,
        model=source.manifest.model,
        notes=[note for note in source.manifest.notes if note.code not in OF_GRAPH] + notes_of(graph),
        recipe=chosen.model_dump(mode="json"),
        passes=[*source.manifest.passes, *reports],
        checks=[*source.manifest.checks, *checks],
        weights=weight_totals(graph),
        precision=precision_of(graph, kernels, chosen),
        session=chosen.session_entries() if quantized_products(graph.graph) else {},
        versions=source.manifest.versions | installed_versions(),
    )
    made = Artifact(graph, manifest, source.companions, keep=folder)
    if output is not None:
        made.manifest = artifacts.write(
            made, output, overwrite=overwrite, on_tensor=lambda done, of: on_stage("writing", done, of)
        )
    return made


def _of_run(report: PassReport, check: Check) -> Check:
    """Say in ``check`` which run of a pass it is about: a pass may run more than once."""
    return check.model_copy(update={"run": report.run})
