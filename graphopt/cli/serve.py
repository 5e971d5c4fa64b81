"""The command ``serve``: an OpenAI-compatible address."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from graphopt.cli.commands import command
from graphopt.cli.console import Threads, err, out
from graphopt.errors import InputError

if TYPE_CHECKING:
    from graphopt.serving.settings import Settings


@command("serve")
def serve(
    folder: Annotated[
        Path | None, typer.Argument(help="an artifact that `optimize --add serve` made; a front alone needs none")
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=0, help="workers here, each with the model and a pool of its own; 0 for a front alone")
    ] = 1,
    host: Annotated[
        str, typer.Option(help="address that the front listens on; 0.0.0.0 is open to other machines")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0 takes a free one")] = 8000,
    name: Annotated[str | None, typer.Option(help="what clients call the model; by default the folder's name")] = None,
    threads: Threads = 0,
    tool_parser: Annotated[
        str | None,
        typer.Option("--tool-parser", help="how the model writes calls of tools, in Dynamo's words, such as hermes"),
    ] = None,
    discovery: Annotated[
        Literal["file", "etcd", "kubernetes"],
        typer.Option(help="how front and workers find each other; with other machines, etcd or kubernetes"),
    ] = "file",
    front: Annotated[bool, typer.Option(help="whether the front runs on this machine")] = True,
    routing: Annotated[
        Literal["prefix", "turns", "random"],
        typer.Option(help="who gets a request: the worker that has read most of its prompt, each in turn, or any"),
    ] = "prefix",
    address: Annotated[
        str | None, typer.Option(help="this machine's address for the others; by default that of its first interface")
    ] = None,
    metrics_port: Annotated[
        int, typer.Option("--metrics-port", min=0, max=32767, help="/metrics of the first worker, others behind it")
    ] = 0,
    drain: Annotated[float, typer.Option(min=0, help="seconds that requests have to end after SIGTERM")] = 60.0,
    cache: Annotated[
        list[Path] | None,
        typer.Option("--cache", help="a file of `graphopt cache make`; each worker reads its text before it answers"),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="start nothing; say whether folder, memory, ports, packages and etcd fit")
    ] = False,
) -> None:
    """Answer many clients at an OpenAI-compatible address: models, chat, completions, streaming.

    NVIDIA Dynamo's front passes requests to workers, each onnxruntime-genai's Engine on the graph of the step `serve`.
    A worker that dies is started again, and its requests go on in another one. SIGTERM and Ctrl-C let requests end.
    With --check exits with 2 where something does not fit.
    """
    from graphopt.serving.replicas import serve as run
    from graphopt.serving.settings import Settings

    settings = Settings(
        name=name or (folder.resolve().name if folder else ""),
        host=host,
        port=port,
        replicas=replicas,
        threads=threads,
        discovery=discovery,
        tool_parser=tool_parser,
        front=front,
        routing=routing,
        address=address,
        metrics_port=metrics_port,
        patience=drain,
        caches=tuple(cache or ()),
    )
    if check:
        return _check(folder, settings)
    run(folder, settings, lambda text: err.print(text, markup=False, highlight=False, soft_wrap=True))
    return None


def _check(folder: Path | None, settings: Settings) -> None:
    from graphopt.serving.checks import examine

    problems = 0
    for finding in examine(folder, settings):
        problems += finding.problem is not None
        mark, text = ("ok", finding.text) if finding.problem is None else ("no", str(finding.problem))
        out.print(f"{mark}  {finding.subject}: {text}", markup=False, highlight=False, soft_wrap=True)
    if problems:
        raise typer.Exit(InputError.exit_code)
