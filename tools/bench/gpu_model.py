"""Whole models on an NVIDIA GPU: tokens per second of one row and of several, of a prompt, and the memory they take.

    python tools/bench/gpu_model.py --make llama-3.1-8b -r tools/bench/recipes/int4-g128.yaml --caches growing int4
    python tools/bench/gpu_model.py --make llama-3.1-8b --peer int4 genai-int4    # by onnxruntime-genai's builder
    python tools/bench/gpu_model.py int4 genai-int4 --json model.json             # on the machine with the GPU
    python tools/bench/gpu_model.py int4 --profile                                # time by kinds of nodes

``--make`` writes graphs alone, of a few hundred kB, and prints how many nodes they have: the one that
`graphopt optimize --target ort-cuda --float16 --last-logits 1` writes, or the builder's. Every pass runs on random
weights; codes and scales are random too. The builder gets 2 layers, and the nodes of the last are copied for all
further ones.
Where graphs are timed, the files of weights that they name are written first, unless they exist: random codes, scales
and norms that keep activations finite. So a model of any size needs neither a checkpoint nor hours; its text is noise.

How it is measured: all models are opened side by side and warmed up. In each round every model decodes and reads, in a
new random order; a figure is the median of the rounds, a ratio the median of the rounds' own ratios to the first model.
``decode R``: R rows of ``--context`` tokens each, then ``--tokens`` steps of R tokens each; only the steps are timed.
``prompt``: one row of ``--prompt`` tokens in one run, logits of its last token. graphopt's models are run by
:class:`graphopt.inference.decoding.decoder.Decoder`, the builder's with buffers that past and present share, as in
onnxruntime-genai: in both, caches stay on the GPU, tokens and logits are in memory of the host. Nothing samples.
Memory is how much less the driver has free after all figures ran once than before the model was opened: weights,
caches, and onnxruntime's arena.

``--profile`` times nothing else: for each model it prints, of one step of decoding and of a prompt, the time by kind of
node and by provider, from onnxruntime's own profile; copies between host and GPU are nodes of their own. onnxruntime
measures on the host, so kernels are started one at a time then (CUDA_LAUNCH_BLOCKING), and each node has some
microseconds more.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import onnx_ir as ir
import typer
from rich.console import Console
from rich.table import Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.artifact.artifact import MODEL
from graphopt.artifact.genai import GENAI_CONFIG
from graphopt.artifact.manifest import MANIFEST, read_manifest
from graphopt.errors import InputError
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.profiling.events import Event, read_events
from graphopt.inference.session import OpenModel, session_from
from graphopt.inference.states.device_memory import DeviceMemory
from graphopt.ort.session import open_session
from graphopt.runtime_ops import library_path
from graphopt.util.targets import Device
from tools.bench.parts.drawn_weights import fill_external_data
from tools.bench.parts.machine import describe
from tools.bench.parts.shared_buffer import SharedBufferDecoder, SharedBufferModel

ENTRIES = {"session.use_device_allocator_for_initializers": "1"}
"""Of every session: weights are allocated at their size, not in onnxruntime's arena, which grows by powers of two."""

PROFILED_STEPS = 8


@dataclass(frozen=True)
class Work:
    """What models do.

    Attributes:
        rows: sequences that are decoded together; each number of them is a figure of its own.
        context: tokens that each has before.
        tokens: steps that are timed.
        prompt: tokens of the prompt.
    """

    rows: tuple[int, ...]
    context: int
    tokens: int
    prompt: int


@dataclass
class Model:
    """A model that is open.

    Attributes:
        name: of its folder.
        session: onnxruntime's.
        vocabulary: tokens are drawn from below this.
        start: begins a batch, given rows and room for tokens; returns the function that feeds tokens [rows, length].
        opening: seconds that opening took.
        memory: bytes of the GPU that it takes; ``None`` without a GPU, or where its driver cannot be asked.
        failures: why a figure failed, by figure.
        seconds: of each round, by figure.
    """

    name: str
    session: Any
    vocabulary: int
    start: Callable[[int, int], Callable[[Any], Any]]
    opening: float = 0.0
    memory: int | None = None
    failures: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def tokens(self, rows: int, length: int) -> Any:
        """Return random tokens [rows, length], the same in each round."""
        return np.random.default_rng(length).integers(0, self.vocabulary, (rows, length))


def is_of_builder(folder: Path) -> bool:
    """Return whether onnxruntime-genai's builder made a model: it has no manifest of graphopt."""
    return not (folder / MANIFEST).is_file() and (folder / GENAI_CONFIG).is_file()


def open_model(folder: Path, device: Device, profile: Path | None = None) -> Model:
    """Open a model of graphopt or of onnxruntime-genai's builder.

    Args:
        folder: the model.
        device: what to compute on.
        profile: as for :func:`graphopt.ort.session.open_session`.

    Raises:
        InputError: it cannot be opened.
    """
    begin = time.perf_counter()
    start: Callable[[int, int], Callable[[Any], Any]]
    inference: Any
    if is_of_builder(folder):
        peer = SharedBufferModel(folder, device, entries=ENTRIES, profile=profile)
        inference, vocabulary = peer.inference, peer.vocabulary
        start = lambda rows, room: SharedBufferDecoder(peer, rows, room=room).step  # noqa: E731
    else:
        manifest = read_manifest(folder)
        entries = {**manifest.session, **ENTRIES}
        inference = open_session(folder / MODEL, entries=entries, device=device, profile=profile)
        session = session_from(OpenModel(folder / MODEL, inference, manifest, None), device=device)
        vocabulary = session.interface.vocabulary or 0
        start = lambda rows, room: Decoder(session, rows, room=room).step  # noqa: E731
    return Model(folder.name, inference, vocabulary, start, opening=time.perf_counter() - begin)


def _cannot_start(rows: int, room: int) -> Callable[[Any], Any]:
    raise RuntimeError(f"a model that could not be opened was given {rows} rows of {room} tokens")


def decode_seconds(model: Model, rows: int, work: Work) -> float:
    """Return the seconds of a step of decoding, after a context and one step to warm up."""
    feed = model.start(rows, work.context + work.tokens + 1)
    feed(model.tokens(rows, work.context))
    token = model.tokens(rows, 1)
    feed(token)
    begin = time.perf_counter()
    for _ in range(work.tokens):
        feed(token)
    return (time.perf_counter() - begin) / work.tokens


def prompt_seconds(model: Model, work: Work) -> float:
    """Return the seconds in which a prompt is read."""
    feed, tokens = model.start(1, work.prompt), model.tokens(1, work.prompt)
    begin = time.perf_counter()
    feed(tokens)
    return time.perf_counter() - begin


def figures_of(work: Work) -> dict[str, tuple[Callable[[Model], float], int]]:
    """Return what is timed, by name: a function that returns seconds, and the tokens of a run of it."""
    figures: dict[str, tuple[Callable[[Model], float], int]] = {}
    for rows in work.rows:
        figures[f"decode {rows}"] = partial(decode_seconds, rows=rows, work=work), rows
    if work.prompt:
        figures["prompt"] = partial(prompt_seconds, work=work), work.prompt
    return figures


def open_warm(folder: Path, device: Device, work: Work) -> Model:
    """Open a model, run every figure once, and note what memory that took; what fails is noted too."""
    before = memory_left(device)
    try:
        model = open_model(folder, device)
    except InputError as error:
        return Model(folder.name, None, 0, _cannot_start, failures=dict.fromkeys(figures_of(work), str(error)))
    print(f"{folder}: opened in {model.opening:.1f} s", flush=True)
    for name, (seconds, _) in figures_of(replace(work, tokens=2)).items():
        try:
            seconds(model)
        except Exception as error:  # whatever onnxruntime raises
            model.failures[name] = str(error)
    after = memory_left(device)
    model.memory = None if before is None or after is None else before - after
    return model


def memory_left(device: Device) -> int | None:
    """Return the bytes that the driver of the GPU could still allocate; ``None`` without one."""
    library = library_path("cuda")
    return None if device == "cpu" or library is None else DeviceMemory(library).available()


def measure(models: Sequence[Model], work: Work, rounds: int, on_round: Callable[[], None]) -> None:
    """Time all figures of all models in each round, in a new random order; ``on_round`` is called after each."""
    turns = [(model, name) for model in models for name in figures_of(work) if name not in model.failures]
    figures = figures_of(work)
    for _ in range(rounds):
        for model, name in random.sample(turns, len(turns)):
            seconds, _ = figures[name]
            model.seconds.setdefault(name, []).append(seconds(model))
        on_round()


def rows_of(models: Sequence[Model], work: Work) -> list[dict[str, Any]]:
    """Return a row for each model: tokens per second, and how many times as fast as the first it is."""
    rows = []
    for model in models:
        row: dict[str, Any] = {"model": model.name, "opening": model.opening, "memory": model.memory}
        row["failures"] = model.failures
        for name, (_, tokens) in figures_of(work).items():
            durations, first = model.seconds.get(name), models[0].seconds.get(name)
            if durations is None:
                continue
            row[name] = {"tokens_per_second": tokens / statistics.median(durations), "seconds": durations}
            if first is not None:
                row[name]["ratio"] = statistics.median(a / b for a, b in zip(first, durations, strict=True))
        rows.append(row)
    return rows


def table_of(rows: Sequence[dict[str, Any]], work: Work) -> Table:
    """Return the rows as a table."""
    names = list(figures_of(work))
    table = Table("model", *(f"{name}, tokens/s" for name in names), "GPU memory, GB", "opened in, s")
    for row in rows:
        cells = []
        for name in names:
            figure = row.get(name)
            ratio = f" ({figure['ratio']:.2f})" if figure and "ratio" in figure else ""
            cells.append(f"{figure['tokens_per_second']:.1f}{ratio}" if figure else "failed")
        memory = "" if row["memory"] is None else f"{row['memory'] / 1e9:.2f}"
        table.add_row(row["model"], *cells, memory, f"{row['opening']:.1f}")
    return table


def profile_of(folder: Path, device: Device, work: Work) -> dict[str, list[dict[str, Any]]]:
    """Return, for a step of decoding and for a prompt, the time by operator and provider, the longest first.

    Raises:
        InputError: the model cannot be opened, or onnxruntime wrote no profile.
    """
    with tempfile.TemporaryDirectory(prefix="graphopt-bench-") as temporary:
        model = open_model(folder, device, Path(temporary) / "profile")
        decode_seconds(model, 1, replace(work, tokens=PROFILED_STEPS))
        for _ in range(2):
            prompt_seconds(model, work)
        kernels, micros = read_events(Path(model.session.end_profiling()))
    # Behind the context and the step that warms up come the steps; of two prompts the second is warm.
    parts = {"decode 1": slice(2, 2 + PROFILED_STEPS), "prompt": slice(-1, None)}
    return {name: by_kind(kernels[part], micros[part]) for name, part in parts.items()}


def by_kind(runs: Sequence[Sequence[Event]], micros: Sequence[int]) -> list[dict[str, Any]]:
    """Return the kinds of nodes of equal runs: nodes and microseconds of a run, and the share of its time.

    Time outside of nodes is listed as the operator ``between nodes``.
    """
    duration_lists: dict[tuple[str, str], list[int]] = {}
    for event in (event for run in runs for event in run):
        duration_lists.setdefault((event.operator, event.provider), []).append(event.duration)
    total = sum(micros)
    duration_lists["between nodes", ""] = [total - sum(map(sum, duration_lists.values()))]
    kinds = [
        {
            "operator": operator,
            "provider": provider.removesuffix("ExecutionProvider"),
            "nodes": len(durations) / len(runs),
            "microseconds": sum(durations) / len(runs),
            "share": sum(durations) / total,
        }
        for (operator, provider), durations in duration_lists.items()
    ]
    return sorted(kinds, key=lambda kind: -kind["microseconds"])


def print_profile(name: str, parts: Mapping[str, Sequence[dict[str, Any]]], console: Console) -> None:
    """Print what :func:`profile_of` returned."""
    for part, kinds in parts.items():
        micros = sum(kind["microseconds"] for kind in kinds)
        table = Table("operator", "provider", "nodes", "µs", "share", title=f"{name}, {part}: {micros:.0f} µs")
        for kind in kinds:
            figures = (f"{kind['nodes']:.0f}", f"{kind['microseconds']:.1f}", f"{kind['share']:.1%}")
            table.add_row(kind["operator"], kind["provider"], *figures)
        console.print(table)


def nodes_of(folder: Path) -> str:
    """Return how many nodes a graph has, which the host of a GPU starts at each token, and of which operators."""
    kinds = Counter(node.op_type for node in ir.load(folder / MODEL).graph)
    return f"{kinds.total()} nodes: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}"


def make(folder: Path, model: str, recipe: str | None, peer: str | None, **options: Any) -> None:
    """Write one graph; see :mod:`tools.bench.parts.large_graphs`.

    Raises:
        typer.BadParameter: neither or both of a recipe and a peer are named.
    """
    from tools.bench.large import MODELS
    from tools.bench.parts.large_graphs import write_graph, write_peer_graph

    if (recipe is None) == (peer is None):
        raise typer.BadParameter("name what is made: a recipe (-r) or what the builder makes (--peer)")
    config = dict(MODELS[model]) if model in MODELS else json.loads((Path(model) / "config.json").read_text())
    config |= {} if options["layers"] is None else {"num_hidden_layers": options["layers"]}
    if recipe is not None:
        target: Any = "ort-cuda" if options["device"] == "cuda" else "ort-cpu"
        write_graph(config, recipe, folder, caches=options["caches"], target=target)
    else:
        write_peer_graph(config, cast("Any", peer), folder, block=options["block"], options=options["builder"])
    print(f"{folder}: {(folder / MODEL).stat().st_size} bytes, {nodes_of(folder)}")


def main(
    folders: Annotated[list[Path], typer.Argument(help="models; ratios are to the first. With --make: where it goes")],
    source: Annotated[
        str | None, typer.Option("--make", help="write a graph: llama-3.1-8b, -70b, or a folder with a config.json")
    ] = None,
    recipe: Annotated[str | None, typer.Option("-r", "--recipe", help="of --make")] = None,
    peer: Annotated[str | None, typer.Option(help="of --make: int4 or fp16, by onnxruntime-genai's builder")] = None,
    caches: Annotated[str | None, typer.Option(help="of --make: growing or pages; as the recipe says")] = None,
    layers: Annotated[int | None, typer.Option(help="of --make: another number of layers")] = None,
    block: Annotated[int, typer.Option(help="of --peer int4: numbers that share a scale")] = 128,
    builder: Annotated[list[str] | None, typer.Option(help="of --peer: more options of the builder, KEY=VALUE")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    rows: Annotated[str, typer.Option(help="numbers of rows that are decoded together")] = "1,8",
    context: Annotated[int, typer.Option(min=1, help="tokens that each row has before")] = 512,
    tokens: Annotated[int, typer.Option(min=1, help="steps of decoding in a round")] = 64,
    prompt: Annotated[int, typer.Option(min=0, help="tokens of the prompt; 0 for no such figure")] = 2048,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    profile: Annotated[bool, typer.Option("--profile", help="print time by kinds of nodes, and nothing else")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here too")] = None,
) -> None:
    """Time whole models on the first GPU, or write graphs of large ones."""
    if source is not None:
        (folder,) = folders
        make(folder, source, recipe, peer, caches=caches, layers=layers, block=block, builder=builder, device=device)
        return
    work = Work(tuple(int(number) for number in rows.split(",") if number), context, tokens, prompt)
    target_device, console = cast("Device", device), Console(width=140)
    figures: dict[str, Any] = {"machine": describe(), "device": device, "work": asdict(work)}

    def write() -> None:
        if json_file is not None:
            json_file.write_text(json.dumps(figures, indent=1) + "\n")

    for folder in folders:
        begin, bytes_written = time.perf_counter(), fill_external_data(folder / MODEL)
        if bytes_written:
            print(
                f"{folder}: {bytes_written / 1e9:.2f} GB of weights drawn in {time.perf_counter() - begin:.1f} s",
                flush=True,
            )
    models: list[Model] = []
    if profile:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # the driver reads it when it is first used
        figures["profiles"] = {folder.name: profile_of(folder, target_device, work) for folder in folders}
        for name, parts in figures["profiles"].items():
            print_profile(name, parts, console)
    else:
        models = [open_warm(folder, target_device, work) for folder in folders]

        def keep() -> None:
            figures["rows"] = rows_of(models, work)
            write()  # what is measured stays, should a later round fail

        measure(models, work, rounds, keep)
        console.print(table_of(figures["rows"], work))
    write()
    failures = [f"{model.name}, {name}: {reason}" for model in models for name, reason in model.failures.items()]
    if failures:
        print("\n".join(failures), file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
