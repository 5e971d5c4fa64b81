"""Measure the shipped model beyond its trained length: with rescaled rotary frequencies, streaming, or neither.

    python tools/studies/longer_context.py  # 2, 4 and 8 times its 1024 positions
    python tools/studies/longer_context.py --factors 2 --texts 2 --methods ntk,yarn
    python tools/studies/longer_context.py --recipe searched=recipe.yaml --json longer.json

Two tables, in bits per byte.

The first is of held-out text in sequences of the longest length, by the position of the token. Positions have different
tokens, so only numbers of one column compare. ``windows`` is the plain model in windows of its trained length, each
token with at least half of that as context: the best without a longer context. Rows below it use their context.

The second shows whether distant text is used: a file, other text, and the same file again. The second copy takes few
bits where the model finds the first one. Columns are distances from copy to copy, in tokens; the first is within the
trained length.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.inference.session import Session
from graphopt.passes.cache.page_kv import PageKV
from graphopt.passes.cache.sparse_kv import SparseKV
from graphopt.passes.lift.canonicalize import Canonicalize
from graphopt.passes.lift.rescale_rope import RescaleRope
from graphopt.passes.lift.rescale_rope.methods import METHODS
from graphopt.passes.recipe import Step, load_recipe
from graphopt.tasks.ports import IntArray
from tools.bench.parts.held_out import (
    Nats,
    as_one,
    nats_in_windows,
    open_shipped_model,
    optimize_artifact,
    without_limit,
)
from tools.bench.parts.options import JsonFile

STREAMING = SparseKV(policy="streaming", sinks=16, recent=496)
COPY_TOKENS = 384
"""Tokens of the file that comes twice."""


@dataclass(frozen=True)
class Variant:
    """A model and the longest sequence that it is made for.

    Attributes:
        name: what the table calls it.
        steps: what is done to the exported model.
        max_tokens: tokens of a sequence; ``None`` for any number.
    """

    name: str
    steps: Sequence[Step]
    max_tokens: int | None = None


@dataclass(frozen=True)
class Row:
    """Bits per byte of one model.

    Attributes:
        what: the model.
        positions: by range of positions.
        copies: of the second copies, by distance.
    """

    what: str
    positions: list[float]
    copies: list[float]


def variants(
    trained_length: int, factors: Sequence[int], methods: Sequence[str], recipes: Sequence[str]
) -> Iterator[Variant]:
    """Yield the models of the tables."""
    yield Variant("plain", [PageKV()])
    yield Variant("streaming", [STREAMING])
    for method in methods:
        for factor in factors:
            step = RescaleRope.model_validate({"method": method, "factor": factor, "trained": trained_length})
            yield Variant(f"{method} x {factor}", [step, PageKV()], factor * trained_length)
    for argument in recipes:
        name, _, file = argument.partition("=")
        steps = [step for step in load_recipe(file).steps if isinstance(step, RescaleRope)]
        yield Variant(name, [*steps, PageKV()], int(steps[0].factor * trained_length))


def buckets(trained_length: int, longest: int) -> list[tuple[int, int]]:
    """Return ranges of positions: the halves of the trained length, then each twice as long as the one before."""
    edges = [0, trained_length // 2, trained_length]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    return list(itertools.pairwise(edges))


def by_position(
    session: Session, texts: Sequence[IntArray], ranges: Sequence[tuple[int, int]], max_tokens: int
) -> list[Nats]:
    """Return the nats of all texts for each range of positions that lies within ``max_tokens``."""
    nats = [as_one(session, ids[: max_tokens + 1])[0] for ids in texts]
    return [np.concatenate([values[begin:end] for values in nats]) for begin, end in ranges if end <= max_tokens]


def copies(ids: IntArray, distances: Sequence[int], texts: int) -> list[list[IntArray]]:
    """Return, by distance, sequences of a file of :data:`COPIED` tokens, other text, and the file again."""
    starts = np.linspace(0, len(ids) - COPY_TOKENS - max(distances), texts).astype(int)
    filler = np.roll(ids, len(ids) // 2)
    return [
        [
            np.concatenate(
                (file := ids[start : start + COPY_TOKENS], filler[start : start + distance - COPY_TOKENS], file)
            )
            for start in starts
        ]
        for distance in distances
    ]


def second_copies(session: Session, sequences: Sequence[IntArray]) -> Nats:
    """Return the nats of the second copies without their first token, which cannot be predicted."""
    return np.concatenate([as_one(session, ids)[0][1 - COPY_TOKENS :] for ids in sequences])


def main(
    factors: Annotated[str, typer.Option(help="how many times the trained length")] = "2,4,8",
    methods: Annotated[
        str, typer.Option(help=f"of rescale_rope: {', '.join(METHODS)}; '' for none")
    ] = "linear,ntk,yarn",
    texts: Annotated[int, typer.Option(min=1, help="sequences of each kind")] = 4,
    recipe: Annotated[list[str] | None, typer.Option(help="NAME=FILE: a recipe with a step rescale_rope")] = None,
    json_file: JsonFile = None,
) -> None:
    """Make each variant, score the texts, print both tables."""
    times = [int(factor) for factor in factors.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "float32"
        float_session, text = open_shipped_model(source, 1 << 20)
        trained_length = float_session.manifest.model.max_positions or 0
        longest = max(times) * trained_length
        ranges, distances = (
            buckets(trained_length, longest),
            [trained_length // 2, *(trained_length * factor * 3 // 4 for factor in times)],
        )
        starts = np.linspace(0, len(text.ids) - longest - 1, texts).astype(int)
        long_texts = [text.ids[start : start + longest + 1] for start in starts]
        copy_texts = copies(text.ids, distances, texts)
        windows = [nats_in_windows(float_session, ids, trained_length) for ids in long_texts]
        first = [nats_in_windows(float_session, ids[:COPY_TOKENS], trained_length) for ids in copy_texts[0]]
        rows = [
            Row(
                "windows",
                [text.bits_per_byte(np.concatenate([values[b:e] for values in windows])) for b, e in ranges],
                [],
            ),
            Row("first copy", [], [text.bits_per_byte(np.concatenate(first))]),
        ]
        all_variants = list(
            variants(trained_length, times, [method for method in methods.split(",") if method], recipe or ())
        )
        for number, variant in enumerate(track(all_variants, console=Console(stderr=True))):
            variant_session = optimize_artifact(
                source, Path(temporary) / str(number), Canonicalize(), *variant.steps, run=False
            )
            session, max_tokens = without_limit(variant_session), variant.max_tokens or longest
            position_nats = by_position(session, long_texts, ranges, min(max_tokens, longest))
            copy_nats = [
                second_copies(session, sequences)
                for distance, sequences in zip(distances, copy_texts, strict=True)
                if distance + COPY_TOKENS <= max_tokens
            ]
            rows.append(
                Row(variant.name, *([text.bits_per_byte(part) for part in nats] for nats in (position_nats, copy_nats)))
            )
    _print("tokens at positions", [f"{begin} to {end}" for begin, end in ranges], {r.what: r.positions for r in rows})
    _print(
        f"{COPY_TOKENS} tokens again, behind",
        [str(distance) for distance in distances],
        {r.what: r.copies for r in rows},
    )
    if json_file is not None:
        report = {"ranges": ranges, "distances": distances, "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(report, indent=2) + "\n")


def _print(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[float]]) -> None:
    table = Table(title, *columns)
    for name, figures in rows.items():
        if figures:
            table.add_row(name, *(f"{figure:.3f}" for figure in figures))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
