"""A graph of any kind, run on samples of inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphopt.errors import InputError
from graphopt.graph.onnx_file import load
from graphopt.ort.session import run
from graphopt.tasks.graph.samples import cast_feeds

if TYPE_CHECKING:
    from graphopt.inference.session import OpenModel
    from graphopt.tasks.graph.samples import Samples
    from graphopt.tasks.ports import Array

MAX_SAMPLES = 1 << 16


def run_graph(
    model: OpenModel, samples: Samples, random: int = 1
) -> tuple[list[dict[str, Array]], list[dict[str, Any]]]:
    """Return what a graph was fed, and its outputs by name, for each sample.

    Args:
        model: the graph.
        samples: what to feed.
        random: how many samples to draw where none were given.

    Raises:
        InputError: the graph cannot be fed, or onnxruntime cannot run it.
    """
    graph = load(model.file).graph
    samples.settle(graph, model.inference)
    feeds = samples.feeds(graph, random if samples.is_random else MAX_SAMPLES)
    return feeds, [outputs_by_name(model, sample) for sample in feeds]


def outputs_by_name(model: OpenModel, feeds: dict[str, Array], names: list[str] | None = None) -> dict[str, Any]:
    """Return outputs of a graph, all by default.

    Raises:
        InputError: onnxruntime cannot run it.
    """
    output_names = [node.name for node in model.inference.get_outputs()] if names is None else names
    try:
        return dict(
            zip(output_names, run(model.inference, output_names, cast_feeds(feeds, model.inference)), strict=True)
        )
    except Exception as error:  # whatever onnxruntime raises where an operator refuses what it is given
        raise InputError(f"onnxruntime cannot run the model: {error}", file=model.file) from error
