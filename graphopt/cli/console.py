"""Shared by all commands: options, streams, progress, reports, texts."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from graphopt.errors import GraphoptError, InputError
from graphopt.util.targets import Device

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from graphopt.graph.diagnostics import Fact
    from graphopt.inference.generation import Completion, Step
    from graphopt.util.progress import Progress

out, err = Console(), Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="print a JSON report instead of tables")]
ShowAll = Annotated[bool, typer.Option("--all", help="list each place that a pass left alone; else kinds, with counts")]
Output = Annotated[Path, typer.Option("-o", "--output", help="folder to write")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace an artifact that is already there")]
NoRun = Annotated[bool, typer.Option("--no-run", help="prove what can be proved, but do not run the model")]
Jobs = Annotated[
    int | None,
    typer.Option(
        "-j", "--jobs", help="processes that share the work: 1 by default; with --cluster, workers to start", min=1
    ),
]
OnCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="compute on the workers of a cluster: dask:// for some on this machine, dask://HOST:PORT, slurm",
    ),
]
WorkFolder = Annotated[
    Path | None,
    typer.Option("--work", help="folder for intermediate weights; by default .OUTPUT-work beside OUTPUT"),
]
StatisticsFolder = Annotated[
    Path | None,
    typer.Option("--statistics", help="folder of statistics that recipes share; by default in the work folder"),
]
PartSize = Annotated[
    str | None,
    typer.Option("--part-size", help="most bytes in a file of weights, such as 2GB; by default one file"),
]
Inputs = Annotated[
    Path | None,
    typer.Option(
        "--inputs",
        help="of a graph that reads no text: an .npz file, or a folder of .npz or .npy files; random inputs without",
    ),
]
OnDevice = Annotated[Device, typer.Option("--device", help="what to compute on; cuda is an NVIDIA GPU")]
Threads = Annotated[int, typer.Option(help="threads of onnxruntime; 0 lets it choose", min=0)]


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """Show a bar with the current stage, on standard error and only on a terminal."""
    columns = (SpinnerColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def say(stage: str, count: int = 0, total: int | None = None) -> None:
            bar.update(task, description=escape(stage), completed=count, total=total)

        yield say


@contextlib.contextmanager
def chosen_workers(jobs: int | None, cluster: str | None) -> Iterator[int | Executor]:
    """Give what evaluates weights: a number of processes, or an executor on a cluster."""
    if cluster is None:
        yield 1 if jobs is None else jobs
        return
    from graphopt.compile.clusters import open_cluster

    with open_cluster(cluster, jobs) as executor:
        yield executor


def show_error(error: GraphoptError) -> None:
    """Show an error as a line on standard error."""
    err.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)


def show_notes(notes: Sequence[Fact]) -> None:
    """Show what a session has to say, each on a line of standard error."""
    for note in notes:
        err.print(f"note: {note}", style="dim", markup=False, highlight=False, soft_wrap=True)


def bytes_of(size: str | None) -> int | None:
    """Return how many bytes a text such as ``2GB`` or ``512MiB`` means; ``None`` for none.

    Raises:
        InputError: it is no size, or 0.
    """
    if size is None:
        return None
    try:
        count = int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError as error:
        raise InputError(f"{size!r} is no size of a file", remedy="write it as 2GB, 512MiB or 4096") from error
    if count < 1:
        raise InputError(f"no tensor fits into a file of {size!r}", remedy="write it as 2GB, 512MiB or 4096")
    return count


def print_json(value: BaseModel | Sequence[Any] | Mapping[str, Any]) -> None:
    """Print a report as JSON on standard output."""
    single = isinstance(value, BaseModel | Mapping)
    values = [value] if isinstance(value, BaseModel | Mapping) else value
    contents = [entry.model_dump(mode="json") if isinstance(entry, BaseModel) else entry for entry in values]
    content = contents[0] if single else contents
    print(json.dumps(content, indent=2))


def print_stream(steps: Iterable[Step]) -> None:
    """Print the text of the only row as it is made."""
    for step in steps:
        sys.stdout.write(step.texts[0])
        sys.stdout.flush()
    sys.stdout.write("\n")


def print_completions(kind: str, names: Sequence[str], completions: Sequence[Completion], *, as_json: bool) -> None:
    """Print texts, each below the name of what it was made of.

    Args:
        kind: what JSON calls these names.
        names: of the rows.
        completions: a text of each.
        as_json: whether to print JSON.
    """
    rows: list[dict[str, Any]] = [
        {kind: name, **completion.model_dump()} for name, completion in zip(names, completions, strict=True)
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        out.rule(f"{row[kind]} ({row['stopped']})")
        out.print(row["text"] or "", markup=False, highlight=False)


def chosen_text(text: Path | None, held_out: bool, usage: str) -> str:
    """Return the text of a file, or the held-out modules.

    Raises:
        InputError: neither or both are given, or the file cannot be read.
    """
    from graphopt.util.stdlib_text import held_out_text

    if (text is None) == (not held_out):
        raise InputError("give either a text or --held-out", remedy=usage)
    return held_out_text() if text is None else read_text(text)


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


def write_text(file: Path, content: str) -> None:
    """Write a UTF-8 file.

    Raises:
        InputError: it cannot be written.
    """
    try:
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise InputError(f"the file cannot be written: {error.strerror}", file=file) from error
