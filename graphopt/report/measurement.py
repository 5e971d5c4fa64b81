"""What one node costs, measured: the errors of a product beside its reference, and its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from graphopt.compile.losses import loss_of
from graphopt.inference.profiling import profile
from graphopt.quality.losses import ProductLoss
from graphopt.report.losses import percent
from graphopt.report.times import duration
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT, TOKENS, REPEATS = 64, 32, 3
"""What is run for the time of one node: tokens of a prompt, single tokens, and how often the prompt is read."""


class Time(BaseModel):
    """What one node takes of a run.

    Attributes:
        tokens: new tokens of the run.
        seconds: of the node; 0 where onnxruntime runs no kernel for it.
        whole: seconds of the whole run.
        kernels: the operators that onnxruntime ran for it.
    """

    model_config = ConfigDict(extra="forbid")

    tokens: int
    seconds: float
    whole: float
    kernels: list[str]


class NodeMeasurement(BaseModel):
    """What was measured of one node.

    Attributes:
        asked: whether errors were asked for.
        loss: the errors of a product; ``None`` for a node that is none.
        times: what it takes of a prompt and of a single token; empty where that was not asked for.
    """

    model_config = ConfigDict(extra="forbid")

    asked: bool
    loss: ProductLoss | None = None
    times: list[Time] = []


def measure_node(
    path: Path, node: str, *, before: Path | None = None, time: bool = False, on_stage: Progress = silent
) -> NodeMeasurement:
    """Measure what one node costs.

    Args:
        path: an artifact of ``graphopt optimize``; for its time alone any causal language model.
        node: the name of a node.
        before: what the artifact was made from: its errors are measured beside it.
        time: whether to profile it.
        on_stage: called when a stage begins.

    Raises:
        InputError: a model cannot be run, or the artifact has no recipe.
    """
    loss = None if before is None else loss_of(before, path, node, on_stage=on_stage)
    times_taken = profile(path, prompt=PROMPT, tokens=TOKENS, repeats=REPEATS, on_stage=on_stage) if time else None
    runs = () if times_taken is None else (run for run in (times_taken.prompt, times_taken.token) if run is not None)
    times = [
        Time(
            tokens=run.tokens,
            seconds=run.nodes.get(node, 0.0),
            whole=run.seconds,
            kernels=run.kernels.get(node, []),
        )
        for run in runs
    ]
    return NodeMeasurement(asked=before is not None, loss=loss, times=times)


def summary_lines(measurement: NodeMeasurement) -> Iterator[str]:
    """Say it in lines."""
    loss = measurement.loss
    if loss is not None:
        inside = "" if loss.accumulated is None else f", {percent(loss.accumulated)} inside the model"
        yield f"error: {percent(loss.local)} alone{inside} (root mean square, of what it makes in floats)"
    elif measurement.asked:
        yield "error: not measured; only products by a weight matrix have errors of their own"
    for time in measurement.times:
        run = "one token" if time.tokens == 1 else f"a prompt of {time.tokens} tokens"
        if time.kernels:
            share = time.seconds / time.whole if time.whole else 0.0
            yield f"time: {duration(time.seconds)}, {share:.1%} of {run}, run as {', '.join(time.kernels)}"
        else:
            yield f"time: 0 of {run}; onnxruntime folded this node or fused it into another"
