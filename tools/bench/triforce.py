"""Time three levels of drafts, as TriForce has them (Sun et al. 2024), behind a long cache, at a given acceptance.

    python tools/bench/triforce.py --folder triforce-1b                 # 1.1 billion int4 weights, 64k tokens of int8
    python tools/bench/triforce.py --folder triforce-1b --context 16k --acceptance 0.8 --middle-acceptance 0.95

    target    a Llama of random weights as int4, which reads all of its cache
    middle    the target's weights; each query reads ``--budget`` tokens of a cache, those of the best pages
    draft     a Llama of 68 million random weights as int4, which reads the first 64 and the newest 192 tokens

The draft guesses, the middle checks its guesses and adds one of its own, until it has enough for the target to check.
Weights that have learnt nothing agree by chance, so each guess is right by a chance that is *given*: ``--acceptance``
for the draft's before the middle (or the target), ``--middle-acceptance`` for the middle's before the target. All steps
are real ones of their widths, with caches that are taken back; only which guesses count is drawn. Caches are *not* read
from a prompt: they are filled with random keys and values as KVAttention would store them, each layer alike.

What steps of each width take is measured first; from that the lengths are chosen that should be fastest, and each way
then writes ``--tokens`` tokens in interleaved rounds, beside single tokens. The models stay in the folder.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
import graphopt
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.decoding.proposers.model import open_draft_model
from graphopt.inference.decoding.proposers.self_model import SelfProposer
from graphopt.inference.session import Session
from graphopt.inference.states.store import SavedStates
from graphopt.passes.recipe import load_recipe
from tools.bench.make_llama import make_llama
from tools.bench.parts.attention_problem import Sequence
from tools.bench.parts.attention_state import fill, summarize
from tools.bench.parts.machine import Others, describe, quiet
from tools.bench.parts.options import JsonFile, token_count

WIDTHS = (1, 2, 3, 4, 6, 8, 12)
"""Tokens of a step whose time is measured."""

_SPARE = 512
"""Tokens that caches have room for behind the context."""


class Level(Protocol):
    """A model with a cache that holds a number of tokens."""

    def feed_to(self, length: int) -> None:
        """Read tokens until the cache has so many."""

    def take_back(self, length: int) -> None:
        """Keep so many tokens, or fewer where the cache cannot keep just so many."""


@dataclass
class Running:
    """A level that runs.

    Attributes:
        decoder: of one row, with its context.
        vocabulary: tokens are drawn from below this.
        seconds: that its steps took.
    """

    decoder: Decoder
    vocabulary: int
    seconds: float = 0.0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def feed_to(self, length: int) -> None:
        """See :class:`Level`."""
        count = length - int(self.decoder.tokens[0])
        if count <= 0:
            return
        ids, began = self.random.integers(0, self.vocabulary, (1, count)), time.perf_counter()
        self.decoder.step(ids)
        self.seconds += time.perf_counter() - began

    def take_back(self, length: int) -> None:
        """See :class:`Level`."""
        if length < int(self.decoder.tokens[0]):
            self.decoder.rewind(self.decoder.nearest(length))


@dataclass
class Expected:
    """A level that only adds up what steps of its widths take."""

    costs: Mapping[int, float]
    length: int
    seconds: float = 0.0

    def feed_to(self, length: int) -> None:
        """See :class:`Level`."""
        count = length - self.length
        if count > 0:
            self.seconds += float(np.interp(count, list(self.costs), list(self.costs.values())))
            self.length = length

    def take_back(self, length: int) -> None:
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
    """Write tokens behind ``begin`` others; return how many: the last step may give some more.

    Args:
        way: who drafts, and how much.
        levels: target, middle and draft, whose caches hold ``begin`` tokens, or fewer that they read first.
        begin: tokens of the text.
        tokens: to write, at least.
        chances: that a guess of the draft is right, and one of the middle.
        seed: of what is right.
    """
    random, done = np.random.default_rng(seed), 0
    while done < tokens:
        length = begin + done  # the newest token of the text is in no cache yet
        guesses = _guess(way, levels, length, chances[0], random)
        levels["target"].feed_to(length + 1 + guesses)
        done += 1 + _right(guesses, chances[1 if way.middle else 0], random)
        for level in levels.values():
            level.take_back(begin + done)
    return done


def _guess(way: Way, levels: Mapping[str, Level], length: int, chance: float, random: np.random.Generator) -> int:
    """Let draft and middle guess behind ``length`` tokens; return how many guesses the target gets."""

    def draft(first: int) -> None:
        for each in range(way.draft):
            levels["draft"].feed_to(first + 1 + each)

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
            levels[name].take_back(length + guesses)
    return guesses


def _right(guesses: int, chance: float, random: np.random.Generator) -> int:
    """Return how many guesses are right before the first wrong one."""
    found = 0
    while found < guesses and random.random() < chance:
        found += 1
    return found


def expected(
    way: Way, costs: Mapping[str, Mapping[int, float]], chances: tuple[float, float], tokens: int = 2000
) -> float:
    """Return seconds for each token, by what steps take."""
    levels = {name: Expected(of_level, 0) for name, of_level in costs.items()}
    done = write(way, levels, 0, tokens, chances, seed=1)
    return sum(level.seconds for level in levels.values()) / done


def best(
    costs: Mapping[str, Mapping[int, float]], chances: tuple[float, float], longest: int
) -> list[tuple[Way, float]]:
    """Return the fastest lengths of each way, with the seconds of a token that they should take."""
    ways = {
        "single tokens": [Way("single tokens")],
        "draft": [Way("draft", draft=n) for n in range(1, longest)],
        "middle": [Way("middle", middle=n) for n in range(1, longest)],
        "three levels": [Way("three levels", *lengths) for lengths in product(range(1, 5), range(1, longest))],
    }
    found = []
    for each in ways.values():
        seconds = {way: expected(way, costs, chances) for way in each}
        fastest = min(seconds, key=lambda way: seconds[way])
        found.append((fastest, seconds[fastest]))
    return found


def build(folder: Path, shapes: Mapping[str, Mapping[str, int]], storage: str) -> dict[str, Path]:
    """Make the models that are not there yet; return their folders.

    Raises:
        BadParameter: models of other shapes lie in the folder.
    """
    found, note = {}, folder / "shapes.json"
    made_before = json.loads(note.read_text()) if note.exists() else shapes
    if made_before != shapes:
        raise typer.BadParameter(f"{folder} holds models of other shapes, {made_before}: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(shapes))
    for name, shape in shapes.items():
        made = found[name] = folder / (f"{name}-{storage}" if name == "target" else name)
        if made.exists():
            continue
        checkpoint, exported = folder / f"{name}-checkpoint", folder / f"{name}-float32"
        if not exported.exists():
            make_llama(checkpoint, **shape)
            graphopt.export(checkpoint, exported)
        options = ["page_kv"] if storage == "float32" else ["quantize_kv"]
        settings = [] if storage == "float32" else [f"quantize_kv.storage={storage}"]
        if name == "draft":
            options, settings = ["sparse_kv"], ["sparse_kv.policy=streaming", "sparse_kv.recent=192"]
        graphopt.optimize(exported, load_recipe("int4-rtn", options, settings), made, target="ort-cpu", run=False)
    return found


def behind_context(session: Session, context: int, threads: int) -> Running:
    """Return a decoder whose cache holds so many random tokens, as the operator stores them."""
    decoder = Decoder(session, 1)
    arrays: dict[str, Any] = {}
    made: dict[Any, dict[str, Any]] = {}
    for layer in session.interface.layers:
        attributes, size = layer.attributes, layer.head_size
        key = (attributes, size)
        if key not in made:
            sequence = Sequence(attributes.kv_heads, size)
            pages = layer.pages(context + _SPARE, WIDTHS[-1])
            state = fill(attributes, sequence, context, pages, threads)
            if attributes.summarizes:
                of_pages = summarize(attributes.summary, attributes.page, sequence, context, pages, threads)
                state["summaries"] = of_pages
            made[key] = state
        names = layer.states(1, 1)
        arrays |= {layer.port(name): made[key][name] for name in names}
    progress = json.dumps([[0]] * len(session.interface.layers))
    decoder.states.restore(SavedStates(arrays, progress))
    decoder._rows = decoder._rows.at_length(np.array([context]), context)
    return Running(decoder, session.interface.vocabulary or 2)


def step_seconds(level: Running, context: int, rounds: int) -> dict[int, float]:
    """Return the median time of a step for each of some widths behind the context."""
    seconds: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for width, found in seconds.items():
        # Of one width after another: the first step behind a wide one takes up to twice as long.
        for _ in range(rounds + 1):
            level.take_back(context)
            begin, before = int(level.decoder.tokens[0]), level.seconds
            level.feed_to(begin + width)
            found.append(level.seconds - before)
    level.take_back(context)
    return {width: statistics.median(found[1:]) for width, found in seconds.items()}


def main(
    folder: Annotated[Path, typer.Option(help="where models are made, and stay; 8 GB while they are made")],
    context: Annotated[str, typer.Option(help="tokens in the cache")] = "64k",
    storage: Annotated[str, typer.Option(help="of the target's cache, as quantize_kv calls it")] = "int8",
    budget: Annotated[int, typer.Option(min=64, help="tokens that the middle reads")] = 4096,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="chance that a guess of the draft is right")] = 0.8,
    middle_acceptance: Annotated[list[float] | None, typer.Option(help="of the middle; the same by default")] = None,
    layers: int = 22,
    hidden: int = 2048,
    inner: int = 5632,
    heads: int = 32,
    key_value_heads: int = 4,
    longest: Annotated[int, typer.Option(min=2, max=12, help="tokens of a step of the target, at most")] = 9,
    tokens: Annotated[int, typer.Option(min=1, help="to write in each round")] = 48,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    json_file: JsonFile = None,
) -> None:
    """Make the models, time their steps, then write tokens in each way; print a row for each."""
    count = token_count(context)
    positions = max(count, 1 << 17) + 2 * _SPARE  # the same models for any context up to 128k
    target_shape = {"layers": layers, "hidden": hidden, "inner": inner, "heads": heads}
    shapes = {
        "target": {**target_shape, "key_value_heads": key_value_heads, "positions": positions},
        "draft": {
            "layers": 2,
            "hidden": 768,
            "inner": 3072,
            "heads": 12,
            "key_value_heads": 12,
            "positions": positions,
        },
    }
    others = Others()
    folders = build(folder, shapes, storage)
    gc.collect()
    sessions = {"target": graphopt.load(folders["target"], threads=threads)}
    sessions["middle"] = SelfProposer.open(sessions["target"], f"retrieval={budget}")._session
    sessions["draft"] = open_draft_model(sessions["target"], folders["draft"])
    levels = {name: behind_context(session, count, threads) for name, session in sessions.items()}
    costs = {name: step_seconds(level, count, 3) for name, level in levels.items()}
    console, rows = Console(width=120), []
    console.print(f"{describe()}; {threads} threads, {count} tokens of {storage}, {budget} retrieved", highlight=False)
    for name, seconds in costs.items():
        steps = ", ".join(f"{width}: {1000 * each:.1f}" for width, each in seconds.items())
        console.print(f"{name}, milliseconds by tokens of a step: {steps}", highlight=False)
    head = ("right: draft, middle", "way", "draft", "middle", "ms a token", "predicted", "times single tokens")
    table = Table(*head)
    for chance in middle_acceptance or [acceptance]:
        chances = (acceptance, chance)
        rows += measure(levels, costs, count, chances, tokens, rounds, longest)
    for row in rows:
        cells = (f"{row['acceptance']:.2f}, {row['middle_acceptance']:.2f}", row["way"], str(row["draft"]))
        figures = (f"{row['milliseconds']:.1f}", f"{row['predicted']:.1f}", f"{row['speedup']:.2f}")
        table.add_row(*cells, str(row["middle"]), *figures)
    console.print(table)
    console.print(quiet(others.share()), highlight=False)
    if json_file is not None:
        report = {"machine": describe(), "context": count, "steps": costs, "rows": rows}
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
    found: dict[Way, list[float]] = {way: [] for way, _ in ways}
    for number in range(rounds):
        for way, _ in ways:
            for level in levels.values():
                level.take_back(context)
                level.feed_to(context)
                level.seconds = 0.0
            done = write(way, levels, context, tokens, chances, seed=number)
            found[way].append(sum(level.seconds for level in levels.values()) / done)
    single = found[ways[0][0]]
    return [
        {
            "acceptance": chances[0],
            "middle_acceptance": chances[1],
            "way": way.name,
            "draft": way.draft,
            "middle": way.middle,
            "milliseconds": 1000 * statistics.median(found[way]),
            "predicted": 1000 * predicted,
            "speedup": statistics.median(a / b for a, b in zip(single, found[way], strict=True)),
        }
        for way, predicted in ways
    ]


if __name__ == "__main__":
    typer.run(main)
