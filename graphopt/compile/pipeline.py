"""A recipe and a model in, an optimized model out: every pass is run, checked, and written down."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_ir.passes.common import NameFixPass

from graphopt.analysis.structure.heads import ORIGIN
from graphopt.artifact import artifact as artifacts
from graphopt.artifact.artifact import Artifact
from graphopt.compile.calibration.statistics import calibration_of
from graphopt.compile.manifest import manifest_of
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Check, PassReport, Rule
from graphopt.graph.weights import check_finite
from graphopt.graph.weights.evaluator import Evaluator, workers
from graphopt.graph.weights.work_folder import new_in, statistics_in, store_in, work_folder
from graphopt.ort.runner import Runner
from graphopt.passes.context import Statistics, Surroundings
from graphopt.passes.recipe import Recipe, load_recipe
from graphopt.quality.compare import TOKENS, WINDOW
from graphopt.quality.judge import Ask, confirm, judge, not_judged, reference_beside
from graphopt.quality.verdict import Requirement
from graphopt.tasks import TASKS
from graphopt.util.progress import Progress, silent
from graphopt.verification.equivalence import NOT_ASKED, Verifier, context_of
from graphopt.verification.kernels import KernelReport, check_kernels, own_nodes, quantized_products
from graphopt.verification.steps import Checks, run_passes

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from graphopt.passes.base import Pass
    from graphopt.util.targets import ChosenTarget

IN_MEMORY = Rule("pipeline.in-memory", "the model came from memory, and quality is measured on files")


def optimize(
    model: str | Path | Artifact,
    recipe: str | Path | Recipe = "int4",
    output: str | Path | None = None,
    *,
    target: ChosenTarget | None = None,
    last_logits: int = 0,
    float16: bool = False,
    overwrite: bool = False,
    run: bool = True,
    jobs: int | Executor = 1,
    work: str | Path | None = None,
    quality_tokens: int = TOKENS,
    require: str | None = None,
    force: bool = False,
    statistics: str | Path | None = None,
    part_size: int | None = None,
    on_stage: Progress = silent,
) -> Artifact:
    """Apply ``recipe`` to ``model``, check it pass by pass, and write it.

    Args:
        model: an artifact folder, an ``.onnx`` file, or what :func:`graphopt.read` made of one. It is not changed.
        recipe: the name of a preset, a YAML file, or a recipe.
        output: the folder to write; ``None`` keeps the result in memory and in a temporary folder that lives as long.
        target: what the model is to run on: the step ``lower`` of the recipe is for that, and is added where there is
            none, for any but ``portable`` with ``merge_products`` in front. ``ort-cpu:avx2`` names the instruction set
            too; ``ort-cpu`` leaves it as the recipe says, by default that of this machine. ``None``: what the recipe
            says, by default ``portable``.
        last_logits: add the step ``last_logits`` with so many positions: enough to generate, not to score a given text;
            12 let steps check drafts.
        float16: add the step ``float16``: compute in float16.
        overwrite: whether an artifact at ``output`` may be replaced.
        run: whether to run the model before and after each pass, where it fits into memory. Without it exact passes
            are still proved where they can be; the rest is reported as not covered.
        jobs: how many processes evaluate weights, each in the memory of its largest; or an executor that does. Any
            number gives the same bytes. A script that asks for several must be importable, see :mod:`multiprocessing`.
        work: the folder for intermediate weights, ``.OUTPUT-work`` beside the output by default. Where this process is
            killed, the folder stays, and the next call goes on with the weights in it; at the end it is removed.
        quality_tokens: tokens of held-out text on which a lossy result is compared with ``model`` before it is written,
            see :mod:`graphopt.quality`; 0 for none.
        require: what its quality must be, such as ``kl<0.05``, see :class:`graphopt.quality.Requirement`.
        force: write a model that is broken, too.
        statistics: a folder in which statistics of models are kept, for recipes that share them. By default they lie
            in the work folder. See :mod:`graphopt.quantization.statistics`.
        part_size: the most bytes in a file of weights, where the disk or a tool wants small files; ``None`` for one.
        on_stage: called when a stage begins, with how many are done.

    Returns:
        The optimized model with its manifest. What each pass changed, and what it left alone and why, is in
        ``manifest.passes``; what was proved or measured after it in ``manifest.checks``.

    Raises:
        InputError: the model, the recipe or the output cannot be used.
        VerificationError: a check failed, the result is broken or does not meet ``require``; nothing was written.
    """
    required = None if require is None else Requirement.parse(require)
    chosen = chosen_recipe(load_recipe(recipe), target, last_logits, float16)
    if output is None:
        if work is not None:
            raise InputError("a work folder is for an artifact that is written", file=work, remedy="name an output too")
        if required is not None:
            raise InputError(
                f"--require {required.text} is for an artifact that is written", remedy="name an output too"
            )
        folder = tempfile.TemporaryDirectory(prefix="graphopt-")
        with workers(jobs) as executor:
            made = _compile(model, chosen, Path(folder.name), executor, statistics, run=run, on_stage=on_stage)
        made.keep = folder
        return made
    output = Path(output)
    artifacts.check_output(output, overwrite=overwrite)

    def examine(folder: Path) -> Check | None:
        if not any(report.effect == "lossy" and report.changes for report in made.manifest.passes):
            return None
        on_stage("judging it on held-out text")
        check = _judged(model, folder, made, judged, window, on_stage, ask)
        confirm(check, required, force=force)
        return check

    steps, judged = chosen.passes(), quality_tokens if run else 0
    # What a cache of few bits or few pages loses shows behind a longer text.
    window = 2 * WINDOW if any(step.phase() == "cache" for step in steps) else WINDOW
    # The step `lower` often leaves a model as it is, which then is not judged.
    lossy = any(step.effect == "lossy" and step.phase() != "lower" for step in steps)
    reference = _place_of(model) if judged and lossy else None
    with (
        work_folder(output, None if work is None else Path(work)) as place,
        workers(jobs) as executor,
        reference_beside(reference, window=window, tokens=judged) as ask,
    ):
        made = _compile(model, chosen, place, executor, statistics, run=run, on_stage=on_stage)
        made.manifest = artifacts.write(
            made,
            output,
            overwrite=overwrite,
            on_tensor=lambda done, of: on_stage("writing", done, of),
            executor=executor,
            within=new_in(place),
            examine=examine,
            part_size=part_size,
        )
        artifacts.read_weights_from(made.model, output)
    return made


def _place_of(model: str | Path | Artifact) -> Path | None:
    return model.place if isinstance(model, Artifact) else Path(model)


def _judged(
    model: str | Path | Artifact,
    folder: Path,
    made: Artifact,
    tokens: int,
    window: int,
    on_stage: Progress,
    ask: Ask | None,
) -> Check:
    """Return the quality of what was written to ``folder``, or why it was not measured."""
    place = _place_of(model)
    ran = [check for check in made.manifest.checks if check.name == TASKS[made.manifest.task].compared]
    if not tokens:
        return not_judged(NOT_ASKED())
    if place is None:
        return not_judged(IN_MEMORY())
    if ran and ran[-1].status == "not covered":
        return not_judged(ran[-1].reason)
    return judge(place, folder, made.manifest.task, window=window, tokens=tokens, on_stage=on_stage, ask=ask)


def chosen_recipe(recipe: Recipe, target: ChosenTarget | None, last_logits: int, float16: bool) -> Recipe:
    """Return a recipe with what :func:`optimize` is asked for beside it."""
    if last_logits:
        recipe = recipe.adding("last_logits").setting("last_logits", positions=int(last_logits))
    recipe = recipe if target is None else recipe.lowered(target)
    return recipe.adding("float16") if float16 else recipe


def _refuse_caches(source: Artifact, recipe: Recipe) -> None:
    """Refuse steps for caches of keys and values where models of this kind have none.

    Raises:
        InputError: there is such a step; names it.
    """
    of_caches = [step.name for step in recipe.passes() if step.phase() == "cache"]
    if of_caches and not TASKS[source.manifest.task].caches:
        raise InputError(
            f"the step {of_caches[0]} of the recipe {recipe.name} is for a cache of keys and values, which a model of "
            f"the task {source.manifest.task} has not",
            file=source.place,
            remedy="choose a recipe without it: `graphopt passes` lists them",
        )


def _compile(
    model: str | Path | Artifact,
    recipe: Recipe,
    place: Path,
    executor: Executor | None,
    kept: str | Path | None,
    *,
    run: bool,
    on_stage: Progress,
) -> Artifact:
    """Return the optimized model; its weights lie in the folder ``place``, or are expressions of what lies there."""
    source = model if isinstance(model, Artifact) else artifacts.read(model)
    recipe = recipe.fitting(source.model.graph).on_this_machine()
    _refuse_caches(source, recipe)
    graph = source.model.clone()

    runner = Runner(recipe.session_entries()) if run else None
    calibration = calibration_of(source, recipe, kept or statistics_in(place), runner, on_stage)
    statistics = Statistics(calibration)
    contained = recipe.self_contained(statistics)
    passes = recipe.passes()
    total = len(passes) + 3
    on_stage("reading the weights", 0, total)
    check_finite(graph, None if isinstance(model, Artifact) else model, executor)
    graph.metadata_props[ORIGIN] = artifacts.origin_of(source)
    on_stage("running the model as it is", 1, total)
    positions = source.manifest.model.max_positions
    context = context_of(passes, positions)
    evaluator = Evaluator(store_in(place), executor)
    with tempfile.TemporaryDirectory(prefix="run-", dir=new_in(place)) as folder:
        verifier = Verifier(Path(folder), recipe.session_entries(), run=run, context=context, evaluator=evaluator)
        verifier.start(graph)
        shared = Surroundings(TASKS[source.manifest.task], recipe.target, verifier.runner, statistics, positions)

        def settle() -> None:
            evaluator.settle(graph, lambda done, of: on_stage("evaluating weights", done, of))

        def begin(step: Pass[Any]) -> None:
            checking.before(step, graph)
            stage(step.name)
            if step.phase() == "lower":
                # It reads scales, to tell which type they are stored in.
                settle()

        def stage(name: str) -> None:
            on_stage(name, 2 + len(reports), total)

        reports: list[PassReport] = []
        with Checks(verifier, stage) as checking:
            for ran in run_passes(graph, passes, shared, earlier=source.manifest.passes, on_pass=begin):
                if ran.report.claims is not None:
                    settle()
                checking.behind(ran, ran.report.claims)
                reports.append(ran.report)
            checks = checking.finish(graph)

        NameFixPass()(graph)
        kernels: KernelReport | None = None
        if quantized_products(graph.graph) or own_nodes(graph.graph):
            on_stage("reading the graph that onnxruntime runs", total - 1, total)
            kernels = check_kernels(graph, verifier.snapshots, recipe.session_entries(), verifier.why_not)
            checks.append(kernels.check)
        if not any(step.phase() == "lower" for step in passes):
            settle()

    manifest = manifest_of(source, graph, contained, reports, checks, kernels)
    return Artifact(graph, manifest, source.companions)
