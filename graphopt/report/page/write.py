"""Makes the page about a model: opens it, compares it with what it was made from, measures what is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphopt.compile.losses import losses
from graphopt.errors import InputError
from graphopt.inference.profiling import profile
from graphopt.report.difference import diff_of
from graphopt.report.page.report import report
from graphopt.report.trace_builder import open_model, trace_of
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class PageOptions:
    """What a page shows besides what the files say.

    Attributes:
        locate_losses: whether to run the model and the one before, to show where quality was lost.
        groups: with ``locate_losses``, whether to measure what groups of products cause, too: two runs for each.
        time: whether to run the model, to show where time goes.
        weights: with ``locate_losses``, whether to draw how weights lie among the levels of their formats.
        context: tokens in the cache, for figures per token.
    """

    locate_losses: bool = False
    groups: bool = True
    time: bool = False
    weights: bool = False
    context: int = 1024


def write(
    model: Path,
    output: Path,
    before: Path | None = None,
    options: PageOptions = PageOptions(),
    on_stage: Progress = silent,
) -> None:
    """Write the page about a model into the HTML file ``output``; one that is there is replaced.

    The others are the arguments of :func:`page_about`.

    Raises:
        InputError: a model cannot be read or run, or the file cannot be written.
    """
    page = page_about(model, before, options, on_stage=on_stage)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"the page cannot be written: {error.strerror}", file=output) from error


def page_about(
    model: Path,
    before: Path | None = None,
    options: PageOptions = PageOptions(),
    *,
    live: bool = False,
    on_stage: Progress = silent,
) -> str:
    """Return the page about a model, in HTML.

    Args:
        model: an artifact, or an .onnx file, of graphopt or not.
        before: what it was made from.
        options: what it shows.
        live: whether it is served by :class:`graphopt.report.page.serve.PageServer`, and follows the model's files.
        on_stage: called when a stage begins.

    Raises:
        InputError: a model cannot be read or run.
    """
    if options.locate_losses and before is None:
        raise InputError("--where compares with the model before", remedy="give --before FOLDER")
    if options.weights and not options.locate_losses:
        raise InputError("--weights is a part of --where", remedy="add --where")
    on_stage("reading the model")
    graph, manifest = open_model(model, weights=before is not None)
    trace = trace_of(graph, manifest, str(model), options.context)
    difference = None
    if before is not None:
        on_stage("comparing it with the model before")
        difference = diff_of(open_model(before), (graph, manifest), (str(before), str(model)))
    model_losses = None
    if options.locate_losses and before is not None:
        model_losses = losses(before, model, restore=options.groups, weights=options.weights, on_stage=on_stage)
    measurement = profile(model, on_stage=on_stage) if options.time else None
    return report(trace, manifest, difference, model_losses, measurement, live=live)
