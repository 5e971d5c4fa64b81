"""What an artifact and a recipe say together about the statistics that steps ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphopt.artifact.tokens import texts_of
from graphopt.quantization.statistics import Calibration
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from graphopt.artifact.artifact import Artifact
    from graphopt.ort.runner import Runner
    from graphopt.passes.recipe import Recipe
    from graphopt.tasks.ports import IntArray


def calibration_of(
    source: Artifact, recipe: Recipe, folder: str | Path, runner: Runner | None, on_stage: Progress = silent
) -> Calibration:
    """Return what collects statistics of a model on the text that a recipe names; nothing is read before it is asked.

    Args:
        source: the model as it came in, with its tokenizer.
        recipe: names the text.
        folder: where statistics are kept.
        runner: runs the model; ``None`` where it may not be run, and only what is kept is found.
        on_stage: called for each text.
    """
    positions = source.manifest.model.max_positions

    def texts() -> list[IntArray]:
        return texts_of(source.companions, recipe.calibration, positions)

    return Calibration(Path(folder), texts, runner, on_stage=on_stage)
