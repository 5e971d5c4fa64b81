"""Collect what a recipe needs to know of a model's activations, before it is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphopt.compile.compilation import Compilation, files_of
from graphopt.errors import InputError
from graphopt.graph.weights.evaluator import workers
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from graphopt.artifact.artifact import Artifact
    from graphopt.passes.recipe import Recipe
    from graphopt.quantization.statistics import InputStatistics


def collect(
    model: str | Path | Artifact,
    recipe: str | Path | Recipe,
    folder: str | Path,
    *,
    jobs: int | Executor = 1,
    on_stage: Progress = silent,
) -> list[InputStatistics]:
    """Run the passes of a recipe up to those that round, and keep the statistics that they ask for.

    Args:
        model: an artifact folder or an ``.onnx`` file, with a tokenizer.
        recipe: what will be done to it.
        folder: where statistics are kept: ``statistics`` of :func:`graphopt.optimize`.
        jobs: an executor on a cluster runs the model on each text apart, see :mod:`graphopt.compile.clusters`; any
            other reads weights. All give the same bytes.
        on_stage: called when a stage begins.

    Returns:
        What the inputs of products look like, in the order of the graph.

    Raises:
        InputError: the model, the recipe or the text cannot be used, or the recipe asks for no statistics.
    """
    with workers(jobs, Path(folder), files_of(model)) as executor:
        compilation = Compilation(
            model, recipe, work=Path(folder), statistics=folder, executor=executor, on_stage=on_stage
        )
        compilation.check_weights()
        compilation.apply_unchecked(compilation.before_phase("lower"), lambda step: on_stage(step.name))
    inputs = compilation.calibration.statistics
    if not inputs:
        raise InputError(
            f"the recipe {compilation.recipe.name} needs no statistics",
            remedy="choose a rounding method that does, such as --set quantize_weights.rounding=gptq",
        )
    return list(inputs.values())
