"""One run of the compiler: a model, the recipe that fits it, and all that the passes of the run share.

`optimize`, `verify`, shards, calibrations, searches, imports and `quality --where` each make a :class:`Compilation` and
run the passes that they need. None of them sets up a context, statistics or checks by hand.

A compilation of an artifact of several graphs owns one compilation for each other graph (:attr:`Compilation.parts`):
the same recipe without what the graph has not, proofs and a manifest of its own. Graphs meet at their ports only, which
no pass moves, so each is proved alone. Where one graph is calibrated, those before it run as they came in.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from pydantic import ValidationError

from graphopt.analysis.structure.convolutions import integer_convolutions
from graphopt.analysis.structure.heads import ORIGIN
from graphopt.analysis.structure.ports import HIDDEN, PREVIOUS_HIDDEN
from graphopt.artifact import artifact as artifacts
from graphopt.artifact.artifact import Artifact
from graphopt.artifact.tokens import texts_of
from graphopt.compile.manifest import manifest_of
from graphopt.errors import InputError
from graphopt.graph.weights import check_finite
from graphopt.graph.weights.evaluator import Evaluator, stage_of
from graphopt.graph.weights.work_folder import new_in, statistics_in, store_in
from graphopt.ort.runner import Runner
from graphopt.ort.session import run as run_session
from graphopt.passes.cache.page_kv import PageKV
from graphopt.passes.context import Statistics, make_context
from graphopt.passes.lift.canonicalize import Canonicalize
from graphopt.passes.recipe import Recipe, load_recipe
from graphopt.quantization.statistics import Calibration
from graphopt.tasks import TASKS, task_of
from graphopt.util.progress import Progress, silent
from graphopt.verification.equivalence import Verifier, context_tokens_of
from graphopt.verification.kernels import KernelReport, check_kernels, own_nodes, quantized_products
from graphopt.verification.steps import Checks, PassRun, run_passes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Executor

    import onnx_ir as ir
    import onnxruntime

    from graphopt.graph.diagnostics import Check, PassReport
    from graphopt.passes.base import Pass
    from graphopt.passes.phases import Phase
    from graphopt.tasks.ports import Array, IntArray
    from graphopt.util.targets import ChosenTarget


Run: TypeAlias = bool | Literal["parts"]
"""Whether a model may be run: as a whole, not at all, or only in parts, one after the other, for statistics."""


def _no_callback(step: Pass) -> None:
    """Do nothing before a pass."""
    del step


def _recorded_recipe(recipe: Mapping[str, Any]) -> Recipe:
    try:
        return Recipe.model_validate(recipe)
    except ValidationError as error:
        raise InputError(
            f"the recipe in the manifest cannot be used: {error}",
            remedy="was it changed after it was made, or made by another version of graphopt?",
        ) from error


def files_of(model: str | Path | Artifact, *further_paths: str | Path | None) -> list[Path]:
    """Return the files and folders that tasks of a compilation read beside its work folder, where they are there."""
    source = model.path if isinstance(model, Artifact) else Path(model)
    paths = [source, *(None if path is None else Path(path) for path in further_paths)]
    return [path for path in paths if path is not None and path.exists()]


class Compilation:
    """A model that a recipe is applied to.

    Args:
        source: an artifact, its folder, or an ``.onnx`` file. It is not changed.
        recipe: the name of a preset, a YAML file, or a recipe. The steps that the graph needs are added, and the
            instructions of this machine named. Or the mapping in a manifest, which was fitted when it was written.
        target: what the model is to run on; ``None``: what the recipe says, by default ``portable``.
        work: the folder for evaluated weights and statistics.
        run: whether the model may be run: ``"parts"`` for statistics alone.
        statistics: the folder of statistics of models, which keeps them; ``None`` for one in ``work``, where they are
            dropped as soon as the weights are rounded that need them.
        inputs: of a graph that reads no text, what it is fed, in the place of what the recipe says.
        executor: what evaluates weights; ``None`` for this process.
        feeds: what a graph is fed of a text, where other graphs than its own parts make that.
        on_stage: called when a stage begins.

    Attributes:
        source: the model as it came in.
        recipe_for_target: the recipe for ``target``, before it was fitted.
        recipe: the recipe that is applied.
        passes: its passes.
        model: the graph that the passes rewrite, a copy of that of ``source``.
        origin: which model it was first made from, see :func:`graphopt.artifact.artifact.origin_of`.
        calibration: collects statistics of activations on the text that the recipe names.
        statistics: what passes ask for statistics.
        context: what the passes share.
        evaluator: evaluates weights into ``work``.
        reports: what the passes did so far.

    Raises:
        InputError: the model or the recipe cannot be read, or the recipe has steps for caches that the model has not.
    """

    def __init__(  # noqa: PLR0913, what a compilation can be given
        self,
        source: str | Path | Artifact,
        recipe: str | Path | Recipe | Mapping[str, Any],
        target: ChosenTarget | None = None,
        *,
        work: Path,
        run: Run = True,
        statistics: str | Path | None = None,
        inputs: Path | None = None,
        executor: Executor | None = None,
        feeds: Callable[[ir.Graph, IntArray], dict[str, Array]] | None = None,
        on_stage: Progress = silent,
    ) -> None:
        self._part_sessions: dict[str, onnxruntime.InferenceSession] = {}
        self._target = target
        self._statistics_folder = statistics
        self.source = source if isinstance(source, Artifact) else artifacts.read(source)
        self._work = work
        self._file = None if isinstance(source, Artifact) else source
        self._executor, self._may_run, self._on_stage = executor, run, on_stage
        if isinstance(recipe, Mapping):
            self.recipe_for_target = self.recipe = _recorded_recipe(recipe)
        else:
            self.recipe_for_target = load_recipe(recipe) if target is None else load_recipe(recipe).with_lower(target)
            self.recipe = self.recipe_for_target.fitting(self.source.model.graph).on_this_machine()
        self.passes = self.recipe.passes()
        self._refuse_unknown_graphs()
        self._refuse_caches()
        self.model, self.origin = self.source.model.clone(), artifacts.origin_of(self.source)
        self.model.metadata_props[ORIGIN] = self.origin
        self._entries, positions = self.recipe.session_entries(), self.source.manifest.model.max_positions
        runner = Runner(self._entries)

        task = TASKS[self.source.manifest.task].with_inputs(inputs or self.recipe.calibration.inputs)

        def texts() -> Sequence[IntArray] | Sequence[Mapping[str, Array]]:
            if not task.reads_text:
                return task.sample_feeds(self.source.model, runner, self.recipe.calibration.windows)
            return texts_of(self.source.companions, self.recipe.calibration, positions)

        folder = Path(statistics or statistics_in(work))
        self.calibration = Calibration(
            folder,
            texts,
            runner if run else None,
            feeds=feeds or self._feeds_of_text,
            on_stage=on_stage,
            executor=executor,
        )
        self.evaluator = Evaluator(store_in(work), executor)
        # In a folder of its own no other recipe asks for what this one has used.
        self.statistics = Statistics(self.calibration, self.evaluator if statistics is None else None)
        instructions = self.recipe.options_of("lower").get("instructions")
        self.context = make_context(task, self.recipe.target, runner, self.statistics, positions, instructions)
        self.reports: list[PassReport] = []

    @classmethod
    def of_pages(cls, source: str | Path | Artifact, work: Path) -> Compilation:
        """Return a compilation whose model is canonical, with its caches in pages where that can be.

        Its last report is that of ``page_kv``.
        """
        steps = Canonicalize(), PageKV()
        compilation = cls(source, Recipe(name="pages", steps=steps, activations="float32"), work=work)
        compilation.apply_unchecked(compilation.of_phases("importing", "lift", "cache"))
        return compilation

    @cached_property
    def parts(self) -> dict[str, Compilation]:
        """The compilations of the other graphs, by the names of their folders."""
        parts: dict[str, Compilation] = {}
        for name, part in self.source.parts.items():
            work = self._work / name
            work.mkdir(exist_ok=True)
            parts[name] = Compilation(
                part,
                self._recipe_of(name, part),
                work=work,
                run=self._may_run,
                statistics=self._statistics_folder,
                executor=self._executor,
                feeds=self._feeds_behind if TASKS[part.manifest.task].follows else None,
                on_stage=self._on_stage,
            )
        return parts

    def _recipe_of(self, name: str, part: Artifact) -> Recipe:
        """Return the recipe for another graph: its own, or this one without steps for caches where it has none.

        A graph that follows makes logits of one position; other steps of the interface are for what makes texts.
        """
        task, steps = TASKS[part.manifest.task], self.recipe_for_target.steps
        if name in self.recipe_for_target.graphs:
            recipe = self.recipe_for_target.graphs[name]
            recipe = recipe if self._target is None else recipe.with_lower(self._target)
        else:
            if not task.caches:
                steps = tuple(step for step in steps if step.phase() != "cache")
            if task.follows:
                steps = tuple(step for step in steps if step.phase() != "interface")
            recipe = self.recipe_for_target.model_copy(update={"steps": steps, "graphs": {}})
        return recipe.adding("last_logits") if task.follows else recipe

    def _refuse_unknown_graphs(self) -> None:
        """Refuse recipes for graphs that the model has not."""
        name = next((name for name in self.recipe_for_target.graphs if name not in self.source.parts), None)
        if name is not None:
            graph_names = ", ".join(self.source.parts)
            raise InputError(
                f"the recipe {self.recipe.name} has a recipe for a graph {name}, which this model has not",
                file=self.source.path,
                remedy=f"its other graphs are {graph_names}" if graph_names else "it is one graph: leave `graphs` out",
            )

    def _feeds_of_text(self, graph: ir.Graph, ids: IntArray) -> dict[str, Array]:
        """Return what to feed for a text; graphs in front that read texts read the same one, and there is no image."""
        feeds = dict(task_of(graph).text_feeds(graph, ids))
        for name, part in self.source.parts.items():
            if TASKS[part.manifest.task].follows or not TASKS[part.manifest.task].reads_text:
                continue
            if name not in self._part_sessions:
                with self.context.runner.open_model(part.model) as session:
                    self._part_sessions[name] = session
            session, inputs = self._part_sessions[name], TASKS[part.manifest.task].text_feeds(part.model.graph, ids)
            outputs = [port.name for port in session.get_outputs()]
            feeds |= dict(zip(outputs, run_session(session, outputs, inputs), strict=True))
        return feeds

    def _feeds_behind(self, graph: ir.Graph, ids: IntArray) -> dict[str, Array]:
        """Return what to feed for a text to a graph that reads hidden states of this one: each before its token."""
        if HIDDEN not in self._part_sessions:
            with self.context.runner.open_model(self.source.model) as session:
                self._part_sessions[HIDDEN] = session
        states = run_session(self._part_sessions[HIDDEN], [HIDDEN], self._feeds_of_text(self.source.model.graph, ids))
        feeds = task_of(graph).text_feeds(graph, ids[:, 1:])
        return {**feeds, PREVIOUS_HIDDEN: np.ascontiguousarray(states[0][:, :-1])}

    def _refuse_caches(self) -> None:
        """Refuse steps for caches of keys and values where models of this kind have none."""
        task = self.source.manifest.task
        step = next((step.name for step in self.passes if step.phase() == "cache"), None)
        if step is not None and not TASKS[task].caches:
            raise InputError(
                f"the step {step} of the recipe {self.recipe.name} is for a cache of keys and values, which a model of "
                f"the task {task} has not",
                file=self.source.path,
                remedy="choose a recipe without it: `graphopt passes` lists them",
            )

    def of_phases(self, *phases: Phase) -> list[Pass]:
        """Return the passes of some phases."""
        return [step for step in self.passes if step.phase() in phases]

    def before_phase(self, phase: Phase) -> list[Pass]:
        """Return the passes in front of a phase that comes last, such as ``lower``."""
        return [step for step in self.passes if step.phase() != phase]

    def check_weights(self) -> None:
        """Read every weight of the model once.

        Raises:
            InputError: one is NaN or infinite.
        """
        check_finite(self.model, self._file, self._executor)

    def apply(self, passes: Iterable[Pass], on_pass: Callable[[Pass], None] = _no_callback) -> Iterator[PassRun]:
        """Run passes on the model, yield each when it has run, and write down its report.

        Raises:
            VerificationError: a pass broke an invariant of its phase.
            InputError: a pass cannot work on the model.
        """
        earlier = [*self.source.manifest.passes, *self.reports]
        for run in run_passes(self.model, passes, self.context, earlier=earlier, on_pass=on_pass):
            self.reports.append(run.report)
            yield run

    def apply_unchecked(self, passes: Iterable[Pass], on_pass: Callable[[Pass], None] = _no_callback) -> None:
        """Run passes on the model, and check nothing but the invariants of their phases."""
        for _ in self.apply(passes, on_pass):
            pass

    def copy_after(self, step: Pass) -> ir.Model:
        """Return what a pass makes of a copy of the model, to be measured: nothing is checked or written down.

        Raises:
            InputError: it cannot work on the model.
        """
        model = self.model.clone()
        step(model, self.context)
        return model

    def verifier(self, folder: Path, *, native: bool = True, run: bool | None = None) -> Verifier:
        """Return what runs models of this compilation to compare them.

        Args:
            folder: where models are written to be run.
            native: whether graphopt's kernels run, or the bodies that the model carries.
            run: whether to run models at all; by default as the compilation may.
        """
        return Verifier(
            folder,
            self._entries,
            run=self._may_run is True if run is None else run,
            native=native,
            context=context_tokens_of(self.passes, self.context.max_positions),
            evaluator=self.evaluator,
            task=self.context.task,
        )

    def apply_checked(self, passes: Sequence[Pass], verifier: Verifier, on_stage: Callable[[str], None]) -> list[Check]:
        """Run passes on the model, and prove or measure each.

        Args:
            passes: what to run.
            verifier: has run the model in front of the first.
            on_stage: called with what begins.

        Raises:
            VerificationError: a check failed.
            InputError: a pass cannot work on the model.
        """
        with Checks(verifier, on_stage) as checks:

            def begin(step: Pass) -> None:
                checks.check_before(step, self.model)
                on_stage(step.name)
                if step.phase() == "lower":  # it reads scales, to tell which type they are stored in
                    self.settle()

            for run in self.apply(passes, begin):
                if run.report.claims is not None and verifier.why_not is None:
                    # The proof and the run that follows read them. A model that is too large to run is not written
                    # to the disk in floats: the proof evaluates each weight for itself.
                    self.settle()
                checks.check_behind(run, run.report.claims)
            return checks.finish(self.model)

    @contextlib.contextmanager
    def run_folder(self) -> Iterator[Path]:
        """Give a folder in the work folder for models while they run; what an earlier run left there is gone."""
        with tempfile.TemporaryDirectory(prefix="run-", dir=new_in(self._work)) as folder:
            yield Path(folder)

    def settle(self) -> None:
        """Evaluate the weights of the model into the work folder."""
        self.evaluator.settle(
            self.model,
            lambda count, total: self._on_stage(stage_of("evaluating weights", self._executor), count, total),
        )

    def has_kernels(self) -> bool:
        """Return whether the model has quantized products, or nodes of graphopt's operators."""
        graph = self.model.graph
        return bool(quantized_products(graph) or own_nodes(graph) or integer_convolutions(graph))

    def check_kernels(self, verifier: Verifier) -> KernelReport:
        """Confirm that quantized products run as the kernels that they are meant for.

        Raises:
            UnfusedError: a product would run on dequantized weights.
        """
        return check_kernels(self.model, verifier.snapshots, self._entries, verifier.why_not)

    def artifact(self, recipe: Recipe, checks: Sequence[Check], kernels: KernelReport | None) -> Artifact:
        """Return the model with its manifest.

        Args:
            recipe: the recipe to write down.
            checks: what was proved or measured.
            kernels: how its quantized products run; ``None`` if it has none.
        """
        manifest = manifest_of(self.source, self.model, recipe, self.reports, checks, kernels)
        return Artifact(self.model, manifest, self.source.companions)
