"""Quality of a graph that reads no text: its outputs beside those of the graph that it was made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.errors import InputError
from graphopt.graph.onnx_file import load
from graphopt.inference.graphs import outputs_by_name
from graphopt.inference.session import open_folder
from graphopt.tasks.graph.outputs import differences, figures_of, outputs_of
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from pathlib import Path

    from graphopt.tasks.graph.samples import Samples

MAX_SAMPLES, RANDOM_SAMPLES = 64, 8
"""Samples to compare on: of those that were given, and random ones."""


def graph_quality(
    reference: str | Path,
    artifact: str | Path,
    samples: Samples,
    *,
    on_stage: Progress = silent,
    **_reading: object,
) -> dict[str, float]:
    """Return the figures of :func:`graphopt.tasks.graph.outputs.figures_of`, and how many samples there were.

    Args:
        reference: the folder or file that ``artifact`` was made from.
        artifact: the folder or file.
        samples: what both are fed.
        on_stage: called when a sample begins.

    Raises:
        InputError: a model cannot be run, or they have no output of one name.
    """
    before, after = open_folder(reference), open_folder(artifact)
    graph = load(before.file).graph
    samples.settle(graph, before.inference)
    feeds = samples.feeds(graph, RANDOM_SAMPLES if samples.is_random else MAX_SAMPLES)
    outputs = {node.name for node in after.inference.get_outputs()}
    names = [node.name for node in before.inference.get_outputs() if node.name in outputs]
    if not names:
        raise InputError("no output of it has the name of one of the graph that it was made from", file=after.file)
    pairs = []
    for number, sample in enumerate(feeds):
        on_stage("comparing outputs", number, len(feeds))
        results = [outputs_by_name(model, sample, names) for model in (before, after)]
        pairs.append([outputs_of(list(outputs.values()), names) for outputs in results])
    if not pairs[0][0]:
        raise InputError("no output is a tensor of numbers, so nothing can be compared", file=before.file)
    figures = figures_of(differences([pair[0] for pair in pairs], [pair[1] for pair in pairs]))
    return {**figures, "samples": float(len(feeds)), "is_random": float(samples.is_random)}
