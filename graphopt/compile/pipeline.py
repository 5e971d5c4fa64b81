"""A recipe and a model in, an optimized model out: every pass is run, checked, and written down."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ir.passes.common import NameFixPass

from graphopt.analysis.structure.product_codes import dequantize_of
from graphopt.artifact import artifact as artifacts
from graphopt.artifact.artifact import Artifact
from graphopt.compile.compilation import Compilation, Run, files_of
from graphopt.errors import InputError
from graphopt.graph import provenance
from graphopt.graph.diagnostics import Check, Rule
from graphopt.graph.weights.evaluator import stage_of, workers
from graphopt.graph.weights.work_folder import new_in, work_folder
from graphopt.passes.codes.quantize_weights import QuantizeWeights
from graphopt.passes.recipe import Recipe, load_recipe
from graphopt.quality.compare import TOKENS, WINDOW
from graphopt.quality.judge import Ask, confirm, judge, not_judged, reference_beside
from graphopt.quality.verdict import Requirement
from graphopt.tasks import TASKS
from graphopt.util.progress import Progress, silent
from graphopt.verification.equivalence import NOT_ASKED
from graphopt.verification.kernels import UnfusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor
    from contextlib import AbstractContextManager

    import onnx_ir as ir

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
    run: Run = True,
    jobs: int | Executor = 1,
    work: str | Path | None = None,
    quality_tokens: int = TOKENS,
    require: str | None = None,
    force: bool = False,
    statistics: str | Path | None = None,
    part_size: int | None = None,
    inputs: str | Path | None = None,
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
            are still proved where they can be; the rest is reported as not covered. ``"parts"``: as without it, but
            parts of the model run one after the other where statistics are collected.
        jobs: how many processes evaluate weights, each in the memory of its largest; or an executor that does, such as
            one of :func:`graphopt.compile.clusters.open_cluster`. Any number gives the same bytes. A script that asks
            for several must be importable, see :mod:`multiprocessing`.
        work: the folder for intermediate weights, ``.OUTPUT-work`` beside the output by default. Where this process is
            killed, the folder stays, and the next call goes on with the weights in it; at the end it is removed.
        quality_tokens: tokens of held-out text on which a lossy result is compared with ``model`` before it is written,
            see :mod:`graphopt.quality`; 0 for none.
        require: what its quality must be, such as ``kl<0.05``, see :class:`graphopt.quality.Requirement`.
        force: write a model that is broken, too.
        statistics: a folder in which statistics of models are kept, for recipes that share them. By default they lie
            in the work folder. See :mod:`graphopt.quantization.statistics`.
        part_size: the most bytes in a file of weights, where the disk or a tool wants small files; ``None`` for one.
        inputs: of a graph that reads no text: an ``.npz`` file or a folder, see :mod:`graphopt.tasks.graph.files`, on
            which passes are compared, statistics collected and the result judged. ``None``: what the recipe says, by
            default random ones.
        on_stage: called when a stage begins, with how many are done.

    Returns:
        The optimized model with its manifest. What each pass changed, and what it left alone and why, is in
        ``manifest.passes``; what was proved or measured after it in ``manifest.checks``.

    Raises:
        InputError: the model, the recipe or the output cannot be used.
        VerificationError: a check failed, the result is broken or does not meet ``require``; nothing was written.
    """
    requirement = None if require is None else Requirement.parse(require)
    extended_recipe = chosen_recipe(load_recipe(recipe), None, last_logits, float16, inputs)
    if output is None:
        _refuse_without_output(work, requirement)
        temporary = tempfile.TemporaryDirectory(prefix="graphopt-")
        with workers(jobs, Path(temporary.name), files_of(model, statistics)) as executor:
            begin = functools.partial(
                Compilation,
                model,
                work=Path(temporary.name),
                run=run,
                statistics=statistics,
                executor=executor,
                on_stage=on_stage,
            )
            result = compile_fusible(begin, extended_recipe, target, on_stage)
        result.keep = temporary
        return result
    output = Path(output)
    artifacts.check_output(output, overwrite=overwrite)
    held_out = HeldOut(model, extended_recipe, quality_tokens if run is True else 0, on_stage)
    with (
        work_folder(output, None if work is None else Path(work)) as folder,
        workers(jobs, folder, files_of(model, statistics)) as executor,
        held_out.reference() as reference,
    ):
        begin = functools.partial(
            Compilation, model, work=folder, run=run, statistics=statistics, executor=executor, on_stage=on_stage
        )
        result = compile_fusible(begin, extended_recipe, target, on_stage)

        def examine(new_folder: Path) -> Check | None:
            check = held_out.judge(result, new_folder, reference)
            if check is not None:
                confirm(check, requirement, force=force)
            return check

        result.manifest = artifacts.write(
            result,
            output,
            overwrite=overwrite,
            on_tensor=lambda count, total: on_stage(stage_of("writing", executor), count, total),
            executor=executor,
            parent=new_in(folder),
            examine=examine,
            part_size=part_size,
        )
        artifacts.read_weights_from(result, output)
    return result


def compile_fusible(
    begin: Callable[..., Compilation], recipe: Recipe, target: ChosenTarget | None, on_stage: Progress = silent
) -> Artifact:
    """Return what :func:`compile_model` makes; products that onnxruntime does not fuse with codes stay in floats.

    A weight that is dequantized in every run makes a model many times slower than in floats, and onnxruntime alone
    knows what it fuses. So what it left is compiled once more without codes, and the recipe in the manifest says so.

    Args:
        begin: makes a compilation of a recipe for a target.
        recipe: the recipe.
        target: what the model is to run on.
        on_stage: called when a stage begins, with how many are done.

    Raises:
        InputError: the model cannot be used, or a pass cannot work on it.
        VerificationError: a check failed.
    """
    compilation = begin(recipe, target)
    try:
        return compile_model(compilation, on_stage)
    except UnfusedError as error:
        graphs = [part.model.graph for part in (compilation, *compilation.parts.values())]
        weights = sorted(weight for graph in graphs for weight in _weights_of(error.products, graph))
        if not weights:
            raise
        on_stage(f"once more, {', '.join(weights)} in floats: onnxruntime does not fuse such a product")
        names = dict.fromkeys(weights)
        (step,) = (step for step in recipe.steps if isinstance(step, QuantizeWeights))
        float_recipe = recipe.setting(step.name, matrices={**step.matrices, **names})
        reason = f"{', '.join(weights)} in floats, since onnxruntime does not fuse such a product"
        float_recipe = float_recipe.model_copy(update={"description": f"{recipe.description} ({reason})".strip()})
        return compile_model(begin(float_recipe, target), on_stage)


def _weights_of(products: Sequence[str], graph: ir.Graph) -> list[str]:
    """Return the weights that ``quantize_weights`` made codes of, which some products now read."""
    readers = [dequantize_of(node) for node in graph if node.name in products]
    history = [step for reader in readers if reader is not None for step in provenance.steps(reader)]
    return sorted({name for step in history if step.pass_name == QuantizeWeights.name for name in step.sources})


def compile_model(compilation: Compilation, on_stage: Progress = silent) -> Artifact:
    """Return what the recipe of a compilation makes of its model: the phases in order, each pass checked.

    Raises:
        InputError: the model cannot be used, or a pass cannot work on it.
        VerificationError: a check failed.
    """
    parts = {name: compile_model(part, on_stage) for name, part in compilation.parts.items()}
    total = len(compilation.passes) + 3
    recipe = compilation.recipe.self_contained(compilation.statistics)
    on_stage("reading the weights", 0, total)
    compilation.check_weights()
    on_stage("running the model as it is", 1, total)
    with compilation.run_folder() as folder:
        verifier = compilation.verifier(folder)
        verifier.start(compilation.model)
        checks = compilation.apply_checked(
            compilation.passes, verifier, lambda stage: on_stage(stage, 2 + len(compilation.reports), total)
        )
        NameFixPass()(compilation.model)
        kernels = None
        if compilation.has_kernels():
            on_stage("reading the graph that onnxruntime runs", total - 1, total)
            kernels = compilation.check_kernels(verifier)
            checks.append(kernels.check)
    # What steps measured on the way takes its place in the recipe.
    result = compilation.artifact(recipe.self_contained(compilation.statistics), checks, kernels)
    result.parts = parts
    return result


def _refuse_without_output(work: str | Path | None, requirement: Requirement | None) -> None:
    """Refuse what only an artifact that is written can have."""
    if work is not None:
        raise InputError("a work folder is for an artifact that is written", file=work, remedy="name an output too")
    if requirement is not None:
        raise InputError(
            f"--require {requirement.text} is for an artifact that is written", remedy="name an output too"
        )


class HeldOut:
    """Compares the result of a lossy recipe with the model that it was made from, on held-out text.

    Args:
        model: what it is made from.
        recipe: the recipe as it was asked for.
        tokens: how many of the text; 0 for no comparison.
        on_stage: called when a stage begins.
    """

    def __init__(self, model: str | Path | Artifact, recipe: Recipe, tokens: int, on_stage: Progress) -> None:
        self._file = model.path if isinstance(model, Artifact) else Path(model)
        self._tokens, self._on_stage, self._inputs = tokens, on_stage, recipe.calibration.inputs
        steps = recipe.passes()
        # What a cache of few bits or few pages loses shows behind a longer text.
        self._window = 2 * WINDOW if any(step.phase() == "cache" for step in steps) else WINDOW
        # The step `lower` often leaves a model as it is, which then is not judged.
        further_steps = [step for graph_recipe in recipe.graphs.values() for step in graph_recipe.passes()]
        self._is_lossy = any(step.effect == "lossy" and step.phase() != "lower" for step in [*steps, *further_steps])

    def reference(self) -> AbstractContextManager[Ask | None]:
        """Run the model that the result is made from, meanwhile, where it will be needed."""
        file = self._file if self._tokens and self._is_lossy else None
        return reference_beside(file, window=self._window, tokens=self._tokens)

    def judge(self, result: Artifact, folder: Path, reference: Ask | None) -> Check | None:
        """Return the quality of what was written to ``folder``, or why it was not measured; ``None`` if it is exact."""
        manifest = result.manifest
        if not any(report.effect == "lossy" and report.changes for report in manifest.passes):
            return None
        self._on_stage(f"judging it on {'held-out text' if TASKS[manifest.task].reads_text else 'samples of inputs'}")
        comparisons = [check for check in manifest.checks if check.name == TASKS[manifest.task].quantity]
        if not self._tokens:
            return not_judged(NOT_ASKED())
        if self._file is None:
            return not_judged(IN_MEMORY())
        if comparisons and comparisons[-1].status == "not covered":
            return not_judged(comparisons[-1].reason)
        return judge(
            self._file,
            folder,
            manifest.task,
            window=self._window,
            tokens=self._tokens,
            on_stage=self._on_stage,
            ask=reference,
            inputs=self._inputs,
        )


def chosen_recipe(
    recipe: Recipe,
    target: ChosenTarget | None,
    last_logits: int,
    float16: bool,
    inputs: str | Path | None = None,
) -> Recipe:
    """Return a recipe with what :func:`optimize` is asked for beside it."""
    if inputs is not None:
        recipe = recipe.model_copy(
            update={"calibration": recipe.calibration.model_copy(update={"inputs": Path(inputs)})}
        )
    if last_logits:
        recipe = recipe.adding("last_logits").setting("last_logits", positions=int(last_logits))
    recipe = recipe if target is None else recipe.with_lower(target)
    return recipe.adding("float16") if float16 else recipe
