"""Collect what a recipe needs to know of a model's activations, before it is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.artifact import artifact as artifacts
from graphopt.artifact.artifact import Artifact
from graphopt.compile.calibration.statistics import calibration_of
from graphopt.errors import InputError
from graphopt.graph.weights import check_finite
from graphopt.ort.runner import Runner
from graphopt.passes.context import Statistics, Surroundings
from graphopt.passes.recipe import Recipe, load_recipe
from graphopt.tasks import TASKS
from graphopt.util.progress import Progress, silent
from graphopt.verification.steps import run_passes

if TYPE_CHECKING:
    from pathlib import Path

    from graphopt.quantization.statistics import InputStatistics


def collect(
    model: str | Path | Artifact,
    recipe: str | Path | Recipe,
    folder: str | Path,
    *,
    on_stage: Progress = silent,
) -> list[InputStatistics]:
    """Run the passes of a recipe up to those that round, and keep the statistics that they ask for.

    Args:
        model: an artifact folder or an ``.onnx`` file, with a tokenizer.
        recipe: what will be done to it.
        folder: where statistics are kept: ``statistics`` of :func:`graphopt.optimize`.
        on_stage: called when a stage begins.

    Returns:
        What the inputs of products look like, in the order of the graph.

    Raises:
        InputError: the model, the recipe or the text cannot be used, or the recipe asks for no statistics.
    """
    source = model if isinstance(model, Artifact) else artifacts.read(model)
    recipe = load_recipe(recipe).fitting(source.model.graph)
    runner = Runner(recipe.session_entries())
    calibration = calibration_of(source, recipe, folder, runner, on_stage)
    task, positions = TASKS[source.manifest.task], source.manifest.model.max_positions
    shared = Surroundings(task, recipe.target, runner, Statistics(calibration), positions)
    graph = source.model.clone()
    check_finite(graph)
    steps = [step for step in recipe.passes() if step.phase() != "lower"]
    for _ in run_passes(graph, steps, shared, on_pass=lambda step: on_stage(step.name)):
        pass
    if not calibration.found:
        raise InputError(
            f"the recipe {recipe.name} needs no statistics",
            remedy="choose a rounding method that does, such as --set quantize_weights.rounding=gptq",
        )
    return list(calibration.found.values())
