"""Quality of a denoiser: the samples of whole loops beside those of the model that it was made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphopt.graph.onnx_file import load
from graphopt.inference.graphs import outputs_by_name
from graphopt.inference.sampling import sampling_loop
from graphopt.inference.session import open_folder
from graphopt.tasks.denoiser import OUTPUTS, STEPS, sample_name, scheduler_of
from graphopt.tasks.encoder import cosines
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from graphopt.tasks.denoiser import DenoiserSamples
    from graphopt.tasks.ports import Array

SEEDS = 4
"""Loops that are compared."""


def loop_quality(
    reference: str | Path,
    artifact: str | Path,
    samples: DenoiserSamples,
    *,
    on_stage: Progress = silent,
    **_reading: object,
) -> dict[str, float]:
    """Return how far samples are from those of the model before, and how far single calls are on the same inputs.

    Both models begin at the same noise and are told the same. ``cosine_mean`` and ``relative_error`` (the largest) are
    of the samples behind the loop; ``cosine of calls`` is the mean over the calls that the model before makes.

    Args:
        reference: the folder or file that ``artifact`` was made from.
        artifact: the folder or file.
        samples: draws what both begin with.
        on_stage: called when a loop begins.

    Raises:
        InputError: a model cannot be run.
        MissingDependencyError: diffusers is not installed, whose schedulers make the steps.
    """
    before, after = open_folder(reference), open_folder(artifact)
    model = load(before.file)
    samples.settle(model.graph, before.inference)
    settings = scheduler_of(model)
    calls: list[float] = []
    cosines, errors = [], []
    for seed in range(SEEDS):
        on_stage("comparing sampling loops", seed, SEEDS)
        feeds = samples.draw(model.graph, seed)
        name = OUTPUTS[sample_name(feeds)]

        def denoise_before(call: Mapping[str, Array], name: str = name) -> Array:
            results = [outputs_by_name(model_side, dict(call), [name])[name] for model_side in (before, after)]
            calls.append(_cosine(*results))
            first: Array = results[0]
            return first

        def denoise_after(call: Mapping[str, Array], name: str = name) -> Array:
            result: Array = outputs_by_name(after, dict(call), [name])[name]
            return result

        first, second = (
            np.asarray(sampling_loop(denoise, settings, feeds, STEPS, seed), np.float64)
            for denoise in (denoise_before, denoise_after)
        )
        cosines.append(_cosine(first, second))
        errors.append(float(np.linalg.norm(first - second) / np.linalg.norm(first)))
    return {
        "cosine_mean": float(np.mean(cosines)),
        "relative_error": max(errors),
        "cosine of calls": float(np.mean(calls)),
        "steps": float(STEPS),
        "samples": float(SEEDS),
    }


def _cosine(first: Array, second: Array) -> float:
    rows = (np.asarray(array, np.float64).reshape(1, -1) for array in (first, second))
    return float(cosines(*rows)[0])
