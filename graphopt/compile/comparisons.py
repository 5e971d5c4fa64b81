"""Models compared with the one that they were made from: each is a task, here or on a cluster."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from graphopt.artifact.manifest import read_manifest
from graphopt.compile.compilation import files_of
from graphopt.compile.losses import losses
from graphopt.compile.pipeline import optimize
from graphopt.graph.weights.evaluator import run_tasks, stage_of, workers
from graphopt.quality.exact_match import exact_matches
from graphopt.quality.judge import quality_figures
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    from graphopt.passes.recipe import Recipe
    from graphopt.quality.losses import Losses

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Reading:
    """What models read to be compared.

    Attributes:
        texts: texts; ``None`` for what ships with Python.
        tokens: how many of them are scored.
        window: tokens that are seen at once.
        inputs: of a model that reads no text: the file or folder of what it is fed.
    """

    texts: Sequence[str] | None
    tokens: int
    window: int
    inputs: Path | None = None


@dataclass(frozen=True)
class Comparison:
    """What is known of a model beside its reference.

    Attributes:
        figures: quality, by name.
        losses: where it was lost, if that was asked for.
    """

    figures: dict[str, float]
    losses: Losses | None


@dataclass(frozen=True)
class TableRow:
    """What a recipe makes of a model.

    Attributes:
        recipe: its name.
        bytes: of all files.
        bits: of a weight.
        seconds: that it took to make it, where it was made.
        figures: quality, by name.
    """

    recipe: str
    bytes: int
    bits: float
    seconds: float
    figures: dict[str, float]


def compare_folders(
    before: Path,
    after: Sequence[Path],
    reading: Reading,
    *,
    locate_losses: bool = False,
    jobs: int | Executor = 1,
    on_stage: Progress = silent,
) -> list[Comparison]:
    """Compare artifacts with the model that they were made from.

    Args:
        before: the model.
        after: the artifacts.
        reading: what they read.
        locate_losses: whether to measure where quality was lost.
        jobs: as for :func:`graphopt.optimize`; tasks are artifacts.
        on_stage: called when a stage begins.

    Raises:
        InputError: as :func:`graphopt.quality.judge.quality_figures` and :func:`graphopt.compile.losses.losses` do.
    """
    tasks = [_Pair(before.absolute(), folder.absolute(), reading, locate_losses) for folder in after]
    with workers(jobs, after[0].absolute().parent, files_of(before, *after, reading.inputs)) as executor:
        return _all_of(executor, _compare, tasks, "comparing", on_stage)


def table_rows(
    model: Path,
    recipes: Sequence[Recipe],
    folder: Path,
    reading: Reading,
    *,
    exercises: int = 0,
    jobs: int | Executor = 1,
    on_stage: Progress = silent,
) -> list[TableRow]:
    """Make a model by several recipes, and compare each with it.

    Args:
        model: an artifact folder or an ``.onnx`` file.
        recipes: the recipes.
        folder: where artifacts are written, under the names of recipes.
        reading: what they read.
        exercises: of each kind that models complete; 0 for none.
        jobs: as for :func:`graphopt.optimize`; tasks are recipes.
        on_stage: called when a stage begins.

    Raises:
        InputError: as :func:`graphopt.optimize` does.
        VerificationError: likewise.
    """
    tasks = [
        _Entry(model.absolute(), recipe, folder.absolute() / recipe.name, reading, exercises) for recipe in recipes
    ]
    with workers(jobs, folder.absolute(), files_of(model, reading.inputs)) as executor:
        return _all_of(executor, _make_row, tasks, "making", on_stage)


@dataclass(frozen=True)
class _Pair:
    before: Path
    after: Path
    reading: Reading
    locate_losses: bool


@dataclass(frozen=True)
class _Entry:
    model: Path
    recipe: Recipe
    output: Path
    reading: Reading
    exercises: int


def _all_of(
    executor: Executor | None,
    function: Callable[..., ResultT],
    tasks: Sequence[TaskT],
    stage: str,
    on_stage: Progress,
) -> list[ResultT]:
    """Return the results in the order of tasks; this process reports stages of each task, others how many are done."""
    results: dict[int, ResultT] = {}
    call = functools.partial(function, on_stage=on_stage) if executor is None else function
    for number, result in run_tasks(executor, call, tasks):
        results[number] = result
        if executor is not None:
            on_stage(stage_of(stage, executor), len(results), len(tasks))
    return [results[number] for number in range(len(tasks))]


def _compare(pair: _Pair, on_stage: Progress = silent) -> Comparison:
    reading = pair.reading
    figures = quality_figures(
        pair.before,
        pair.after,
        read_manifest(pair.after).task,
        texts=reading.texts,
        tokens=reading.tokens,
        window=reading.window,
        on_stage=on_stage,
        inputs=reading.inputs,
    )
    report = (
        losses(pair.before, pair.after, reading.texts, window=reading.window, on_stage=on_stage)
        if pair.locate_losses
        else None
    )
    return Comparison(figures, report)


def _make_row(entry: _Entry, on_stage: Progress = silent) -> TableRow:
    begin = time.perf_counter()
    optimize(entry.model, entry.recipe, entry.output, overwrite=True, quality_tokens=0, force=True, on_stage=on_stage)
    seconds = time.perf_counter() - begin
    manifest = read_manifest(entry.output)
    figures = _compare(_Pair(entry.model, entry.output, entry.reading, False), on_stage).figures
    if entry.exercises:
        on_stage(f"exercises of {entry.recipe.name}")
        figures |= exact_matches(entry.output, entry.exercises)
    return TableRow(
        recipe=entry.recipe.name,
        bytes=sum(file.stat().st_size for file in entry.output.iterdir()),
        bits=manifest.weights.bits_per_weight if manifest.weights else 0.0,
        seconds=seconds,
        figures=figures,
    )
