"""Time three levels of drafts, as in TriForce (Sun et al. 2024), with a long cache, at a given acceptance.

    python tools/bench/triforce.py --folder triforce-1b                 # 1.1 billion int4 weights, 64k tokens of int8
    python tools/bench/triforce.py --folder triforce-1b --context 16k --acceptance 0.8 --middle-acceptance 0.95
    python tools/bench/triforce.py --folder triforce-8b --device cuda --shape llama-3.1-8b --make    # graphs alone
    python tools/bench/triforce.py --folder triforce-8b --device cuda --shape llama-3.1-8b --context 128k

    target    a Llama of random weights as int4, which reads all of its cache
    middle    the target's weights; each query reads ``--budget`` tokens of a cache, those of the best pages
    draft     a Llama of 68 million random weights as int4, which reads the first 64 and the newest 192 tokens

The draft guesses, the middle checks its guesses and adds one of its own, until it has enough for the target to check.
Random weights predict nothing, so whether a guess is right is drawn with a *given* probability: ``--acceptance`` for
the draft's guesses (checked by the middle, or the target), ``--middle-acceptance`` for the middle's (checked by the
target). All steps are real steps of their widths, with logits of all their tokens in memory of the host and caches that
are rolled back; only the number of accepted guesses is drawn. Caches are *not* read from a prompt: they are filled with
random keys and values as KVAttention would store them, the same in each layer.

Steps of each width are timed first; from these times the fastest lengths are predicted, and each way then writes
``--tokens`` tokens in interleaved rounds, beside single tokens. A token's time is that of steps and of rolling back
caches, which has a column of its own: on a GPU the summaries of retrieval's newest pages are made on the host.

``--make`` only writes graphs to the folder, as `graphopt optimize` makes them: it needs torch, transformers and
onnxscript. Random weights for the files that graphs name are written where they are timed, which needs none of these;
see :mod:`tools.bench.parts.drawn_weights`. Everything stays in the folder.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, cast

import numpy as np
import onnx_ir as ir
import typer
from rich.console import Console
from rich.table import Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.artifact.artifact import MODEL
from graphopt.artifact.manifest import read_manifest
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.decoding.proposers.draft_threads import choose_threads
from graphopt.inference.session import OpenModel, Session, session_from
from graphopt.inference.states.store import SavedStates
from graphopt.ort.session import Entries, open_session
from graphopt.util.targets import Device
from tools.bench.parts.attention_problem import Sequence
from tools.bench.parts.attention_state import fill, summarize
from tools.bench.parts.drawn_weights import fill_external_data
from tools.bench.parts.machine import OtherLoad, describe, quiet
from tools.bench.parts.options import JsonFile, token_count

WIDTHS = (1, 2, 3, 4, 6, 8, 12)
"""Tokens of a step whose time is measured."""

_SPARE = 512
"""Tokens that caches have room for after the context."""

SHAPES = {
    "llama-1.1b": {"layers": 22, "hidden": 2048, "inner": 5632, "heads": 32, "kv_heads": 4, "vocabulary": 32000},
    "llama-3.1-8b": {"layers": 32, "hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "vocabulary": 128256},
}
"""Targets by their names."""

_DRAFT = {"layers": 2, "hidden": 768, "inner": 3072, "heads": 12, "kv_heads": 12}
"""A Llama of 68 million parameters, with the vocabulary of the target."""

_ON_GPU = {"session.use_device_allocator_for_initializers": "1"}
"""Entries of sessions there: weights take their size, not a power of two in onnxruntime's arena."""


class Level(Protocol):
    """A model with a cache that holds a number of tokens."""

    def feed_to(self, length: int) -> None:
        """Read tokens until the cache has ``length``."""

    def roll_back(self, length: int) -> None:
        """Keep ``length`` tokens, or fewer where the cache cannot keep exactly that many."""


@dataclass
class Running:
    """A level that runs.

    Attributes:
        decoder: of one row, with its context.
        vocabulary: tokens are drawn from below this.
        seconds: of its steps and of rolling back.
        rollback_seconds: of rolling back alone.
    """

    decoder: Decoder
    vocabulary: int
    seconds: float = 0.0
    rollback_seconds: float = 0.0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def feed_to(self, length: int) -> None:
        """See :class:`Level`."""
        count = length - int(self.decoder.tokens[0])
        if count <= 0:
            return
        ids, begin = self.random.integers(0, self.vocabulary, (1, count)), time.perf_counter()
        self.decoder.step(ids)
        self.seconds += time.perf_counter() - begin

    def roll_back(self, length: int) -> None:
        """See :class:`Level`."""
        begin = time.perf_counter()
        if length < int(self.decoder.tokens[0]):
            self.decoder.rewind(self.decoder.nearest(length))
        seconds = time.perf_counter() - begin
        self.seconds += seconds
        self.rollback_seconds += seconds


@dataclass
class SimulatedLevel:
    """A level that only adds up the measured times of steps."""

    costs: Mapping[int, float]
    length: int
    seconds: float = 0.0

    def feed_to(self, length: int) -> None:
        """See :class:`Level`."""
        count = length - self.length
        if count > 0:
            self.seconds += float(np.interp(count, list(self.costs), list(self.costs.values())))
            self.length = length

    def roll_back(self, length: int) -> None:
        """See :class:`Level`."""
        self.length = min(self.length, length)


@dataclass(frozen=True)
class Way:
    """How tokens are drafted.

    Attributes:
        name: what the table calls it.
        draft: guesses of the draft at a time; 0 for none.
        middle: tokens that the middle makes, at least, before the target checks; 0 for no middle.
    """

    name: str
    draft: int = 0
    middle: int = 0


def write(
    way: Way, levels: Mapping[str, Level], begin: int, tokens: int, chances: tuple[float, float], seed: int
) -> int:
    """Write tokens after ``begin`` others; return how many: the last step may yield some more than ``tokens``.

    Args:
        way: who drafts, and how much.
        levels: target, middle and draft, whose caches hold ``begin`` tokens, or fewer that they read first.
        begin: tokens of the text.
        tokens: to write, at least.
        chances: that a guess of the draft is right, and one of the middle.
        seed: of what is right.
    """
    random, count = np.random.default_rng(seed), 0
    while count < tokens:
        length = begin + count  # the newest token of the text is in no cache yet
        guesses = _guess(way, levels, length, chances[0], random)
        levels["target"].feed_to(length + 1 + guesses)
        count += 1 + _right(guesses, chances[1 if way.middle else 0], random)
        for level in levels.values():
            level.roll_back(begin + count)
    return count


def _guess(way: Way, levels: Mapping[str, Level], length: int, chance: float, random: np.random.Generator) -> int:
    """Let draft and middle guess after ``length`` tokens; return how many guesses the target gets."""

    def draft(first: int) -> None:
        for index in range(way.draft):
            levels["draft"].feed_to(first + 1 + index)

    if not way.middle:
        draft(length)
        return way.draft
    guesses = 0
    while guesses < way.middle:
        if way.draft:
            draft(length + guesses)
        levels["middle"].feed_to(length + guesses + 1 + way.draft)
        guesses += 1 + _right(way.draft, chance, random)
        for name in ("middle", "draft"):
            levels[name].roll_back(length + guesses)
    return guesses


def _right(guesses: int, chance: float, random: np.random.Generator) -> int:
    """Return how many guesses are right before the first wrong one."""
    count = 0
    while count < guesses and random.random() < chance:
        count += 1
    return count


def expected_seconds(
    way: Way, costs: Mapping[str, Mapping[int, float]], chances: tuple[float, float], tokens: int = 2000
) -> float:
    """Return the expected seconds of a token, from the times of steps."""
    levels = {name: SimulatedLevel(step_costs, 0) for name, step_costs in costs.items()}
    count = write(way, levels, 0, tokens, chances, seed=1)
    return sum(level.seconds for level in levels.values()) / count


def best(
    costs: Mapping[str, Mapping[int, float]], chances: tuple[float, float], longest: int
) -> list[tuple[Way, float]]:
    """Return the fastest lengths of each way, with the expected seconds of a token."""
    ways = {
        "single tokens": [Way("single tokens")],
        "draft": [Way("draft", draft=n) for n in range(1, longest)],
        "middle": [Way("middle", middle=n) for n in range(1, longest)],
        "three levels": [Way("three levels", *lengths) for lengths in product(range(1, 5), range(1, longest))],
    }
    choices = []
    for candidates in ways.values():
        seconds = {way: expected_seconds(way, costs, chances) for way in candidates}
        fastest = min(seconds, key=lambda way: seconds[way])
        choices.append((fastest, seconds[fastest]))
    return choices


def build(
    folder: Path, shapes: Mapping[str, Mapping[str, int]], storage: str, budget: int, device: Device
) -> dict[str, Path]:
    """Make the graphs that are not there yet; return their files. Target and middle lie beside their weights.

    Raises:
        BadParameter: models of other shapes or for another device lie in the folder.
    """
    note, description = folder / "shapes.json", {"device": device, **shapes}
    old_description = json.loads(note.read_text()) if note.exists() else description
    if old_description != description:
        raise typer.BadParameter(f"{folder} holds models of other shapes, {old_description}: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(description))
    target = folder / f"target-{storage}"
    files = {"target": target / MODEL, "middle": target / f"middle-{budget}.onnx", "draft": folder / "draft" / MODEL}
    for name, shape in shapes.items():
        if not files[name].parent.exists():
            _write_graph(files[name].parent, shape, None if name == "draft" else storage, device)
    if not files["middle"].exists():
        _write_middle(files["target"], budget, files["middle"])
    return files


def _write_graph(folder: Path, shape: Mapping[str, int], storage: str | None, device: Device) -> None:
    """Write a graph with logits of all tokens of a step; without a storage the caches stream, as the draft's do."""
    # torch, transformers and onnxscript, which the machine with the GPU may lack
    from graphopt.passes.recipe import load_recipe
    from tools.bench.parts.large_graphs import without_caches, write_graph

    if storage is None:
        add, settings = ["sparse_kv"], ["sparse_kv.policy=streaming", "sparse_kv.recent=192"]
    elif storage == "float32":
        add, settings = ["page_kv"], []
    else:
        add, settings = ["quantize_kv"], [f"quantize_kv.storage={storage}"]
    base = "int4-rtn" if device == "cpu" else Path(__file__).parent / "recipes" / "int4-g128.yaml"
    recipe = load_recipe(without_caches(load_recipe(base)), add, settings)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": shape["layers"],
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["inner"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "vocab_size": shape["vocabulary"],
        "max_position_embeddings": shape["positions"],
        "tie_word_embeddings": False,
    }
    target: Literal["ort-cpu", "ort-cuda"] = "ort-cpu" if device == "cpu" else "ort-cuda"
    write_graph(config, recipe, folder, target=target, float16=device != "cpu", last_logits=WIDTHS[-1])


def _write_middle(target: Path, budget: int, file: Path) -> None:
    """Write the graph that drafts as self:retrieval, which reads the target's weights."""
    from graphopt.inference.decoding.proposers.self_model import retrieve

    model = ir.load(target)
    retrieve(model, budget)
    file.write_bytes(ir.to_proto(model).SerializeToString())


def open_level(file: Path, threads: int, device: Device, entries: Entries) -> Session:
    """Open a model without its tokenizer, as tokens are random; the files of its weights must exist."""
    manifest = read_manifest(file.parent)
    device_entries = {} if device == "cpu" else _ON_GPU
    entries = {**manifest.session, **device_entries, **entries}
    inference = open_session(file, entries=entries, threads=threads, device=device)
    return session_from(OpenModel(file, inference, manifest, None), device=device)


def open_levels(files: Mapping[str, Path], threads: int, device: Device) -> dict[str, Session]:
    """Draw weights that are not there yet, and open target, middle and draft."""
    for name in ("target", "draft"):
        fill_external_data(files[name])
    target = open_level(files["target"], threads, device, {})

    def open_smaller(name: str) -> Session:
        return choose_threads(target, lambda number, entries: open_level(files[name], number, device, entries))

    return {"target": target, "middle": open_smaller("middle"), "draft": open_smaller("draft")}


def behind_context(session: Session, context: int, threads: int) -> Running:
    """Return a decoder whose cache holds ``context`` random tokens, as the operator stores them."""
    decoder = Decoder(session, 1)
    arrays: dict[str, Any] = {}
    states_by_layer: dict[Any, dict[str, Any]] = {}
    for layer in session.interface.layers:
        attributes, size = layer.attributes, layer.head_size
        key = (attributes, size)
        if key not in states_by_layer:
            sequence = Sequence(attributes.kv_heads, size)
            pages = layer.pages(context + _SPARE, WIDTHS[-1])
            state = fill(attributes, sequence, context, pages, threads)
            if attributes.summarizes:
                page_summaries = summarize(attributes.summary, attributes.page, sequence, context, pages, threads)
                state["summaries"] = page_summaries
            states_by_layer[key] = state
        names = layer.states(1, 1)
        arrays |= {layer.port(name): states_by_layer[key][name] for name in names}
    progress = json.dumps([[0]] * len(session.interface.layers))
    decoder.states.restore(SavedStates(arrays, progress))
    decoder._rows = decoder._rows.at_length(np.array([context]), context)
    return Running(decoder, session.interface.vocabulary or 2)


def step_seconds(level: Running, context: int, rounds: int) -> dict[int, float]:
    """Return the median seconds of a step of each width after the context."""
    seconds: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for width, samples in seconds.items():
        # One width after another: the first step after a wide one takes up to twice as long.
        for _ in range(rounds + 1):
            level.roll_back(context)
            begin, before = int(level.decoder.tokens[0]), level.seconds
            level.feed_to(begin + width)
            samples.append(level.seconds - before)
    level.roll_back(context)
    return {width: statistics.median(samples[1:]) for width, samples in seconds.items()}


def main(
    folder: Annotated[Path, typer.Option(help="where models are made, and stay; a byte for two weights")],
    context: Annotated[str, typer.Option(help="tokens in the cache")] = "64k",
    storage: Annotated[str, typer.Option(help="of the target's cache, as quantize_kv calls it")] = "int8",
    budget: Annotated[int, typer.Option(min=64, help="tokens that the middle reads")] = 4096,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="chance that a guess of the draft is right")] = 0.8,
    middle_acceptance: Annotated[list[float] | None, typer.Option(help="of the middle; the same by default")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    shape: Annotated[str, typer.Option(help=f"of the target: {' or '.join(SHAPES)}")] = "llama-1.1b",
    layers: Annotated[int | None, typer.Option(min=1, help="another number of layers of the target")] = None,
    make: Annotated[bool, typer.Option("--make", help="make the graphs, and nothing else")] = False,
    longest: Annotated[int, typer.Option(min=2, max=12, help="tokens of a step of the target, at most")] = 9,
    tokens: Annotated[int, typer.Option(min=1, help="to write in each round")] = 48,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    json_file: JsonFile = None,
) -> None:
    """Make the models, time their steps, then write tokens in each way; print a row for each."""
    if shape not in SHAPES or device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"shapes are {', '.join(SHAPES)}, and devices cpu and cuda; not {shape} and {device}")
    count, target_device = token_count(context), cast("Device", device)
    target = SHAPES[shape] | ({} if layers is None else {"layers": layers})
    common = {"positions": max(count, 1 << 17) + 2 * _SPARE}  # the same models for any context up to 128k
    shapes = {"target": target | common, "draft": {**_DRAFT, "vocabulary": target["vocabulary"]} | common}
    load = OtherLoad()
    files = build(folder, shapes, storage, budget, target_device)
    if make:
        return
    gc.collect()
    begin = time.perf_counter()
    sessions = open_levels(files, threads, target_device)
    end = time.perf_counter()
    writers = threads if target_device == "cpu" else os.cpu_count() or threads
    levels = {name: behind_context(session, count, writers) for name, session in sessions.items()}
    print(f"opened in {end - begin:.1f} s, caches filled in {time.perf_counter() - end:.1f} s", flush=True)
    costs = {name: step_seconds(level, count, 3) for name, level in levels.items()}
    console, rows = Console(width=120), []
    console.print(
        f"{describe()}; {shape} on {device}, {threads} threads, {count} tokens of {storage}, {budget} retrieved",
        highlight=False,
    )
    for name, seconds in costs.items():
        steps = ", ".join(f"{width}: {1000 * value:.2f}" for width, value in seconds.items())
        console.print(f"{name}, milliseconds by tokens of a step: {steps}", highlight=False)
    head = ("right: draft, middle", "way", "draft", "middle", "ms a token", "taking back", "predicted")
    table = Table(*head, "times single tokens")
    for chance in middle_acceptance or [acceptance]:
        chances = (acceptance, chance)
        rows += measure(levels, costs, count, chances, tokens, rounds, longest)
    for row in rows:
        cells = (f"{row['acceptance']:.2f}, {row['middle_acceptance']:.2f}", row["way"], str(row["draft"]))
        figures = (f"{row[name]:.2f}" for name in ("milliseconds", "rewind_milliseconds", "predicted", "speedup"))
        table.add_row(*cells, str(row["middle"]), *figures)
    console.print(table)
    console.print(quiet(load.share()), highlight=False)
    if json_file is not None:
        report = {"machine": describe(), "device": device, "shape": shape, "storage": storage, "context": count}
        report |= {"steps": costs, "rows": rows}
        json_file.write_text(json.dumps(report, indent=2) + "\n")


def measure(
    levels: Mapping[str, Running],
    costs: Mapping[str, Mapping[int, float]],
    context: int,
    chances: tuple[float, float],
    tokens: int,
    rounds: int,
    longest: int,
) -> list[dict[str, Any]]:
    """Write tokens in the best of each way, in interleaved rounds; return a row for each."""
    ways = best(costs, chances, longest)
    samples: dict[Way, list[float]] = {way: [] for way, _ in ways}
    rewinds: dict[Way, list[float]] = {way: [] for way, _ in ways}
    for number in range(rounds):
        for way, _ in ways:
            for level in levels.values():
                level.roll_back(context)
                level.feed_to(context)
                level.seconds = level.rollback_seconds = 0.0
            count = write(way, levels, context, tokens, chances, seed=number)
            samples[way].append(sum(level.seconds for level in levels.values()) / count)
            rewinds[way].append(sum(level.rollback_seconds for level in levels.values()) / count)
    single = samples[ways[0][0]]
    return [
        {
            "acceptance": chances[0],
            "middle_acceptance": chances[1],
            "way": way.name,
            "draft": way.draft,
            "middle": way.middle,
            "milliseconds": 1000 * statistics.median(samples[way]),
            "rewind_milliseconds": 1000 * statistics.median(rewinds[way]),
            "predicted": 1000 * seconds,
            "speedup": statistics.median(a / b for a, b in zip(single, samples[way], strict=True)),
        }
        for way, seconds in ways
    ]


if __name__ == "__main__":
    typer.run(main)
