"""The ``graphopt`` command.

Exit codes: 0 done, 1 something unforeseen, 2 the input cannot be used, 3 a check failed and nothing was written,
4 an optional package is missing. Results go to standard output, progress and errors to standard error.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table

from graphopt.errors import GraphoptError, InputError
from graphopt.passes import Target
from graphopt.progress import Progress
from graphopt.runtime_ops import Device

app = typer.Typer(
    name="graphopt",
    help="Make a language model small and fast in onnxruntime.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out, err = Console(), Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="print a JSON report instead of tables")]
Output = Annotated[Path, typer.Option("-o", "--output", help="folder to write")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace an artifact that is already there")]
NoRun = Annotated[bool, typer.Option("--no-run", help="prove what can be proved, but do not run the model")]
OnDevice = Annotated[Device, typer.Option("--device", help="what to compute on; cuda is an NVIDIA GPU")]
Threads = Annotated[int, typer.Option(help="threads of onnxruntime; 0 lets it choose", min=0)]


@app.command()
def demo(output: Output = Path("graphopt-demo"), as_json: Json = False) -> None:
    """Export, rotate, quantize, check and run the model that ships with graphopt."""
    from graphopt.demo import PROMPT, run_demo
    from graphopt.view.tables import megabytes

    with progress() as say:
        result = run_demo(output, say)
    if as_json:
        return print_json(result)
    names = ("size", "bits per\nweight", "bits per\nbyte", "logit\nchange", "product\ninputs", "seconds")
    table = Table(*(Column(name, no_wrap=True) for name in ("stage", *names)))
    for stage in result.stages:
        table.add_row(
            stage.name,
            megabytes(stage.bytes),
            f"{stage.bits_per_weight:.2f}",
            f"{stage.bits_per_byte:.4f}",
            f"{stage.largest_logit_change:.1e}",
            stage.activations,
            f"{stage.seconds:.1f}",
        )
    out.print(table)
    out.print(
        f"bits per byte: on {result.held_out_bytes:,} bytes of standard-library source that training never saw; "
        f"xz -9e needs {result.xz_bits_per_byte:.4f}"
    )
    proved = next(stage for stage in result.stages if stage.proof is not None)
    out.print(f"\n{proved.name} is proved: {proved.proof}", highlight=False)
    for stage in (result.stages[0], result.stages[-1]):
        out.print(f"\n[bold]{stage.name}[/bold] completes:")
        out.print(PROMPT + stage.completion, markup=False, highlight=False)
    last = result.stages[-1].folder
    out.print(f'\nwritten: {last}. Try: graphopt run {last} --prompt "class Stack:"', soft_wrap=True)


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="a shipped model, a Hugging Face folder or hub id, or an .onnx file")],
    output: Output,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Bring a model in as ONNX: one graph for prefill and decode, with its tokenizer."""
    from graphopt.models.export import export as run_export

    with progress() as say:
        manifest = run_export(model, output, overwrite=overwrite, on_stage=say)
    report_artifact(output, manifest, as_json)


@app.command()
def optimize(
    model: Annotated[Path, typer.Argument(help="an exported folder, or an .onnx file")],
    output: Output,
    recipe: Annotated[str, typer.Option("-r", "--recipe", help="a preset's name, or a YAML file")] = "rotate-int4",
    target: Annotated[
        Target | None,
        typer.Option(
            help="what it is to run on: adds the step `lower`, or sets its target; ort-... also merges products"
        ),
    ] = None,
    last_logits: Annotated[
        bool, typer.Option("--last-logits", help="logits of the last position only: to generate, not to evaluate")
    ] = False,
    overwrite: Overwrite = False,
    no_run: NoRun = False,
    as_json: Json = False,
) -> None:
    """Apply a recipe, check every pass, and write the folder that an app deploys."""
    from graphopt.pipeline import optimize as run_optimize

    with progress() as say:
        made = run_optimize(
            model,
            recipe,
            output,
            target=target,
            last_logits=last_logits,
            overwrite=overwrite,
            run=not no_run,
            on_stage=say,
        )
    report_artifact(output, made.manifest, as_json)


@app.command()
def verify(
    before: Annotated[Path, typer.Argument(help="the artifact that AFTER was made from")],
    after: Annotated[Path, typer.Argument(help="an artifact that `graphopt optimize` wrote")],
    no_run: NoRun = False,
    as_json: Json = False,
) -> None:
    """Prove again, from the two folders alone, that AFTER computes what BEFORE computes; --json has every finding."""
    from graphopt.proof import verify as run_verify
    from graphopt.view.tables import checks_table

    with progress() as say:
        proof = run_verify(before, after, run=not no_run, on_stage=say)
    if as_json:
        return print_json(proof)
    out.print(checks_table(proof.checks))
    return None


@app.command()
def bases(
    model: Annotated[Path, typer.Argument(help="an exported folder, or an .onnx file")],
    as_it_is: Annotated[bool, typer.Option(help="leave out the passes canonicalize and fold_norms")] = False,
    as_json: Json = False,
) -> None:
    """Show what could be rotated: every basis with what writes and reads it, or what keeps it from being rotated."""
    from graphopt.analysis.bases import find_bases
    from graphopt.artifact import read
    from graphopt.passes import PASSES
    from graphopt.view.bases import describe, lines

    graph = read(model).model
    for name in () if as_it_is else ("canonicalize", "fold_norms"):
        PASSES[name](PASSES[name].options_type())(graph)
    found = [describe(basis) for basis in find_bases(graph.graph)]
    if as_json:
        return print_json(found)
    for line in lines(found):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    return None


@app.command()
def heads(
    model: Annotated[Path, typer.Argument(help="an exported folder, or an .onnx file, whose heads read everything")],
    text: Annotated[Path | None, typer.Option("--text", help="a UTF-8 file to read")] = None,
    held_out: Annotated[bool, typer.Option(help="read the standard-library modules that stdlib_lm never saw")] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="write the calibration here: `heads` of the step sparse_kv"),
    ] = None,
    sinks: Annotated[int, typer.Option(min=0, help="first tokens that streaming and retrieval read")] = 64,
    recent: Annotated[int, typer.Option(min=1, help="newest tokens that they read")] = 256,
    budget: Annotated[int, typer.Option(min=0, help="pages that retrieval reads besides")] = 16,
    page: Annotated[int, typer.Option(help="tokens of a page: 16, 32, 64 or 128")] = 64,
    window: Annotated[int | None, typer.Option(help="tokens in a window; the model's positions, up to 2048")] = None,
    windows: Annotated[int, typer.Option(min=1, help="windows, spaced over the text")] = 8,
    as_json: Json = False,
) -> None:
    """Measure per layer and head what policies keep of attention, and which are retrieval heads."""
    from graphopt.calibrate import calibrate
    from graphopt.passes import SparseKVOptions
    from graphopt.runtime_ops.kv_attention.attributes import PAGES
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
        out.print(f"left out, as they have windows of their own: layers {', '.join(map(str, found.windowed))}")
    if output is not None:
        out.print(f"written: {output}. A recipe's step sparse_kv takes it as `heads: {output}`", soft_wrap=True)
    return None


@app.command()
def run(
    folder: Annotated[Path, typer.Argument(help="an artifact")],
    prompt: Annotated[list[str], typer.Option("--prompt", help="a text to complete; repeat it for a batch")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="draw among the k likeliest tokens")] = None,
    top_p: Annotated[float, typer.Option(help="draw among the likeliest tokens that reach this probability")] = 1.0,
    seed: int = 0,
    threads: Threads = 0,
    device: OnDevice = "cpu",
    as_json: Json = False,
) -> None:
    """Complete one or more prompts, streaming as the model goes."""
    from graphopt.decoding.sampling import Sampling
    from graphopt.generate import generate, stream
    from graphopt.session import load

    session = load(folder, threads=threads, device=device)
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


@app.command("eval")
def evaluate(
    folder: Annotated[Path, typer.Argument(help="an artifact")],
    text: Annotated[Path | None, typer.Option("--text", help="a UTF-8 file to read")] = None,
    held_out: Annotated[bool, typer.Option(help="read the standard-library modules that stdlib_lm never saw")] = False,
    window: Annotated[int | None, typer.Option(help="tokens in a window; the model's positions, up to 2048")] = None,
    stride: Annotated[int | None, typer.Option(help="tokens that a window adds; half of it by default")] = None,
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Measure perplexity and bits per byte on a text, in sliding windows."""
    from graphopt.evaluate import evaluate as run_evaluate
    from graphopt.session import load

    content = chosen_text(text, held_out, "graphopt eval FOLDER --text FILE")
    session = load(folder, threads=threads)
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


@app.command()
def passes(as_json: Json = False) -> None:
    """List the passes: what each does to a graph, and whether it is exact."""
    from graphopt.passes import PASSES

    found = [{"name": p.name, "effect": p.effect, "doc": inspect.getdoc(p) or ""} for p in PASSES.values()]
    if as_json:
        return print_json(found)
    for entry in found:
        out.print(f"[bold]{entry['name']}[/bold] ({entry['effect']})")
        out.print(entry["doc"] + "\n", markup=False, highlight=False, soft_wrap=True)
    return None


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="print this one as YAML, every option spelled out")] = None,
    as_json: Json = False,
) -> None:
    """List the recipes that ship with graphopt, or print one to start your own from."""
    from graphopt.recipe import load_recipe, presets

    if name is not None:
        recipe = load_recipe(name)
        return print_json(recipe) if as_json else print(recipe.to_yaml(), end="")
    found = presets()
    if as_json:
        return print_json([recipe.model_dump(mode="json") for recipe in found.values()])
    table = Table("recipe", "steps", "what it does")
    for recipe in found.values():
        table.add_row(recipe.name, ", ".join(step.step for step in recipe.steps), recipe.description)
    out.print(table)
    return None


def report_artifact(folder: Path, manifest: Any, as_json: bool) -> None:
    """Print what an artifact is and how it came to be."""
    from graphopt.view.tables import passes_table, skips_table, summary

    if as_json:
        return print_json(manifest)
    if manifest.passes:
        out.print(passes_table(manifest))
        skips = skips_table(manifest.passes)
        if skips is not None:
            out.print(skips)
    for line in summary(manifest):
        out.print(escape(line), highlight=False)
    out.print(f"written: {folder}", soft_wrap=True)
    return None


def chosen_text(text: Path | None, held_out: bool, usage: str) -> str:
    """Return the text of a file, or the held-out modules.

    Raises:
        InputError: neither or both are asked for, or the file cannot be read.
    """
    from graphopt.models.stdlib_text import held_out_text

    if (text is None) == (not held_out):
        raise InputError("give either a text or --held-out", remedy=usage)
    return held_out_text() if text is None else read_text(text)


def write_text(file: Path, content: str) -> None:
    """Write a UTF-8 file.

    Raises:
        InputError: it cannot be written.
    """
    try:
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise InputError(f"the file cannot be written: {error.strerror}", file=file) from error


def read_text(file: Path) -> str:
    """Read a UTF-8 file.

    Raises:
        InputError: it is not there, or not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"the text cannot be read: {error.strerror}", file=file) from error
    except UnicodeDecodeError as error:
        raise InputError(f"the text is not UTF-8: {error}", file=file) from error


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """Show a bar with a word on what happens, on standard error and only on a terminal."""
    columns = (SpinnerColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def say(stage: str, done: int = 0, total: int | None = None) -> None:
            bar.update(task, description=escape(stage), completed=done, total=total)

        yield say


def print_json(value: BaseModel | Sequence[Any]) -> None:
    """Print a report as JSON on standard output."""
    values = [value] if isinstance(value, BaseModel) else value
    dumped = [each.model_dump(mode="json") if isinstance(each, BaseModel) else each for each in values]
    content = dumped[0] if isinstance(value, BaseModel) else dumped
    print(json.dumps(content, indent=2))


def main() -> None:
    """Run the command; an error that graphopt foresees becomes a line on standard error and an exit code."""
    try:
        app()
    except GraphoptError as error:
        err.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise SystemExit(error.exit_code) from error
    except KeyboardInterrupt as interrupt:
        raise SystemExit(130) from interrupt
