"""Commands that run a model: ``run``, ``eval``, ``heads``, ``profile``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from graphopt.cli.commands import command
from graphopt.cli.console import Json, OnDevice, Threads, chosen_text, out, print_json, progress, write_text
from graphopt.cli.encoders import print_closeness, print_embeddings
from graphopt.errors import InputError


@command("run")
def run(
    folder: Annotated[Path, typer.Argument(help="an artifact")],
    prompt: Annotated[
        list[str], typer.Option("--prompt", help="a text to complete, or to embed; several make a batch")
    ],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="draw among the k most likely tokens")] = None,
    top_p: Annotated[float, typer.Option(help="draw among the most likely tokens that reach this probability")] = 1.0,
    seed: int = 0,
    threads: Threads = 0,
    device: OnDevice = "cpu",
    as_json: Json = False,
) -> None:
    """Complete one or more prompts, streaming as the model goes; of an encoder, print the cosines of embeddings.

    The options of generating (--max-new-tokens, --temperature, --top-k, --top-p, --seed) are refused with an encoder.
    """
    from graphopt.decoding.sampling import Sampling
    from graphopt.generation import generate, stream
    from graphopt.session import open_folder, session_from

    opened = open_folder(folder, threads=threads, device=device)
    if opened.manifest.task == "encoder":
        if (max_new_tokens, temperature, top_k, top_p, seed) != (64, 0.0, None, 1.0, 0):
            raise InputError("an encoder generates nothing", file=folder, remedy="leave out the options of generating")
        return print_embeddings(opened, prompt, as_json)
    session = session_from(opened, device=device)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if as_json:
        completions = generate(session, prompt, max_new_tokens=max_new_tokens, sampling=sampling)
        return print_json([{"prompt_text": t, **c.model_dump()} for t, c in zip(prompt, completions, strict=True)])
    if len(prompt) == 1:
        steps = stream(session, prompt, max_new_tokens=max_new_tokens, sampling=sampling)
        sys.stdout.write(prompt[0])
        for step in steps:
            sys.stdout.write(step.texts[0])
            sys.stdout.flush()
        sys.stdout.write("\n")
        return None
    with progress() as say:
        say("generating")
        completions = generate(session, prompt, max_new_tokens=max_new_tokens, sampling=sampling)
    for number, (text, completion) in enumerate(zip(prompt, completions, strict=True), start=1):
        out.rule(f"{number} ({completion.stopped})")
        out.print(text + (completion.text or ""), markup=False, highlight=False)
    return None


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
    from graphopt.evaluation import evaluate as run_evaluate
    from graphopt.session import open_folder, session_from

    content = chosen_text(text, held_out, "graphopt eval FOLDER --text FILE")
    opened = open_folder(folder, threads=threads)
    if opened.manifest.task == "encoder":
        if window is not None or stride is not None:
            raise InputError("an encoder reads a text line by line", file=folder, remedy="leave out window and stride")
        return print_closeness(opened, reference, content, threads, as_json)
    if reference is not None:
        raise InputError(
            "--reference is for encoders, and this is a causal language model", file=folder, remedy="leave it out"
        )
    session = session_from(opened)
    with progress() as say:
        result = run_evaluate(
            session, content, window=window, stride=stride, on_progress=lambda done, of: say("reading", done, of)
        )
    if as_json:
        return print_json(result)
    table = Table("tokens", "bytes", "perplexity", "bits per byte", "window", "stride", "seconds")
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
    from graphopt.calibrate import calibrate
    from graphopt.passes.cache.sparse_kv import SparseKVOptions
    from graphopt.runtime_ops.kv_attention.spec.attributes import PAGES
    from graphopt.view.heads import heads_table, policies_table

    content = chosen_text(text, held_out, "graphopt heads MODEL --text FILE")
    if page not in PAGES:
        raise InputError(f"there are no pages of {page} tokens", remedy=f"choose one of {PAGES}")
    if output is not None and not output.absolute().parent.is_dir():
        raise InputError("there is no such folder to write to", file=output, remedy="make it, or choose another")
    options = SparseKVOptions.model_validate({"sinks": sinks, "recent": recent, "budget": budget, "page": page})
    with progress() as say:
        found = calibrate(
            model,
            content,
            streaming=options.model_copy(update={"policy": "streaming"}),
            retrieval=options,
            window=window,
            windows=windows,
            on_stage=say,
        )
    if output is not None:
        write_text(output, found.model_dump_json(indent=2) + "\n")
    if as_json:
        return print_json(found)
    out.print(heads_table(found))
    out.print(policies_table(found))
    if found.windowed:
        out.print(f"left out, since they have sliding windows: layers {', '.join(map(str, found.windowed))}")
    if output is not None:
        out.print(f"written: {output}. A recipe's step sparse_kv takes it as `heads: {output}`", soft_wrap=True)
    return None


@command("profile")
def profile_model(
    model: Annotated[Path, typer.Argument(help="an artifact, or an .onnx file of a causal language model")],
    prompt: Annotated[int, typer.Option("--prompt-tokens", min=1, help="tokens of the prompt")] = 128,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="single tokens behind it")] = 32,
    threads: Threads = 0,
    perfetto: Annotated[
        Path | None, typer.Option(help="also write onnxruntime's trace, which ui.perfetto.dev shows")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show where time goes, prompt and single tokens apart: by role, layers together, and by the pass that made it."""
    from graphopt.profiling import profile
    from graphopt.view.times import times_table, told
    from graphopt.view.tracing import trace

    with progress() as say:
        found = profile(model, prompt=prompt, tokens=tokens, threads=threads, perfetto=perfetto, on_stage=say)
    if as_json:
        return print_json(found)
    traced = trace(model, prompt + tokens)
    for run in (found.prompt, found.token):
        if run is not None:
            out.print(times_table(traced, run, found.bandwidth))
    for line in told(traced, found):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    return None
