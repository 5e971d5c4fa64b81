"""Commands that measure a model as it runs: ``eval``, ``heads``, ``profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphopt.cli.commands import command
from graphopt.cli.console import Inputs, Json, Threads, chosen_text, out, print_json, progress, show_notes, write_text
from graphopt.errors import InputError


@command("eval")
def evaluate(
    folder: Annotated[Path, typer.Argument(help="an artifact")],
    text: Annotated[Path | None, typer.Option("--text", help="a UTF-8 file to read")] = None,
    held_out: Annotated[bool, typer.Option(help="read the standard-library modules that stdlib_lm never saw")] = False,
    window: Annotated[int | None, typer.Option(help="tokens in a window; the model's positions, up to 2048")] = None,
    stride: Annotated[int | None, typer.Option(help="tokens that a window adds; half of it by default")] = None,
    reference: Annotated[
        Path | None,
        typer.Option(help="for an encoder: what to compare embeddings with, the float export"),
    ] = None,
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Measure perplexity and bits per byte on a text, in sliding windows; of an encoder, cosines with a reference.

    An encoder embeds each distinct line of the text; it takes no --window and no --stride.
    """
    from graphopt.inference.session import open_folder, session_from
    from graphopt.quality.evaluation import evaluate as run_evaluate
    from graphopt.report.console_table import ConsoleTable, figure_columns
    from graphopt.tasks import TASKS

    content = chosen_text(text, held_out, "graphopt eval FOLDER --text FILE")
    model = open_folder(folder, threads=threads)
    show_notes(model.notes)
    task = TASKS[model.manifest.task]
    if not task.generates or task.parts:
        if window is not None or stride is not None:
            raise InputError(f"{task.noun} reads no windows", file=folder, remedy="leave out window and stride")
        return task.print_evaluation(model, reference, content, threads, as_json)
    if reference is not None:
        raise InputError(f"--reference is for encoders, and this is {task.noun}", file=folder, remedy="leave it out")
    session = session_from(model)
    with progress() as say:
        result = run_evaluate(
            session,
            content,
            window=window,
            stride=stride,
            on_progress=lambda count, total: say("reading", count, total),
        )
    if as_json:
        return print_json(result)
    table = ConsoleTable(
        figure_columns("tokens", "bytes", "perplexity", "bits per byte", "window", "stride", "seconds")
    )
    table.add_row(
        f"{result.tokens:,}",
        f"{result.bytes:,}",
        f"{result.perplexity:.3f}",
        f"{result.bits_per_byte:.4f}",
        str(result.window),
        str(result.stride),
        f"{result.seconds:.1f}",
    )
    out.print(table)
    return None


@command("heads")
def heads(
    model: Annotated[Path, typer.Argument(help="an exported folder, or an .onnx file, whose heads read everything")],
    text: Annotated[Path | None, typer.Option("--text", help="a UTF-8 file to read")] = None,
    held_out: Annotated[bool, typer.Option(help="read the standard-library modules that stdlib_lm never saw")] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="write the calibration to this file: `heads` of the step sparse_kv"),
    ] = None,
    sinks: Annotated[int, typer.Option(min=0, help="first tokens that streaming and retrieval read")] = 64,
    recent: Annotated[int, typer.Option(min=1, help="newest tokens that they read")] = 256,
    budget: Annotated[int, typer.Option(min=0, help="further pages that retrieval reads")] = 16,
    page: Annotated[int, typer.Option(help="tokens of a page: 16, 32, 64 or 128")] = 64,
    window: Annotated[int | None, typer.Option(help="tokens in a window; the model's positions, up to 2048")] = None,
    windows: Annotated[int, typer.Option(min=1, help="windows, spaced over the text")] = 8,
    as_json: Json = False,
) -> None:
    """Measure, per layer and head, the share of attention that policies keep, and which heads are retrieval heads."""
    from graphopt.compile.calibration.heads import calibrate
    from graphopt.passes.cache.sparse_kv import SparseKV
    from graphopt.report.heads import heads_table, policies_table
    from graphopt.runtime_ops.kv_attention.spec.attributes import PAGES

    content = chosen_text(text, held_out, "graphopt heads MODEL --text FILE")
    if page not in PAGES:
        raise InputError(f"there are no pages of {page} tokens", remedy=f"choose one of {PAGES}")
    if output is not None and not output.absolute().parent.is_dir():
        raise InputError("there is no such folder to write to", file=output, remedy="make it, or choose another")
    options = SparseKV.model_validate({"sinks": sinks, "recent": recent, "budget": budget, "page": page})
    with progress() as say:
        calibration = calibrate(
            model,
            content,
            streaming=options.model_copy(update={"policy": "streaming"}),
            retrieval=options,
            window=window,
            windows=windows,
            on_stage=say,
        )
    if output is not None:
        write_text(output, calibration.model_dump_json(indent=2) + "\n")
    if as_json:
        return print_json(calibration)
    out.print(heads_table(calibration))
    out.print(policies_table(calibration))
    if calibration.windowed:
        out.print(f"left out, since they have sliding windows: layers {', '.join(map(str, calibration.windowed))}")
    if output is not None:
        out.print(f"written: {output}. A recipe's step sparse_kv takes it as `heads: {output}`", soft_wrap=True)
    return None


@command("profile")
def profile_model(
    model: Annotated[Path, typer.Argument(help="an artifact, or an .onnx file")],
    prompt: Annotated[int, typer.Option("--prompt-tokens", min=1, help="tokens of the prompt")] = 128,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="single tokens behind it")] = 32,
    threads: Threads = 0,
    perfetto: Annotated[
        Path | None, typer.Option(help="also write onnxruntime's trace, which ui.perfetto.dev shows")
    ] = None,
    inputs: Inputs = None,
    as_json: Json = False,
) -> None:
    """Show where time goes, prompt and single tokens apart: by role, layers together, and by the pass that made it."""
    from graphopt.inference.profiling import profile
    from graphopt.report.times import summary_lines, times_table
    from graphopt.report.trace_builder import trace

    with progress() as say:
        measurement = profile(
            model, prompt=prompt, tokens=tokens, threads=threads, perfetto=perfetto, inputs=inputs, on_stage=say
        )
    if as_json:
        return print_json(measurement)
    model_trace = trace(model, prompt + tokens)
    for run in (measurement.prompt, measurement.token):
        if run is not None:
            out.print(times_table(model_trace, run, measurement.bandwidth))
    for line in summary_lines(model_trace, measurement):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    return None
