"""Measure what sparse caches keep of a model: text far beyond its trained length, and a part of the tokens within it.

    python tools/long_text.py                         # the shipped model; 5 minutes on two cores
    python tools/long_text.py --tokens 20000 --json long_text.json

Streaming scores the whole text as one sequence, and its cache must not grow. The plain model is scored in windows of
its trained length, which is the best it can do, and then as one sequence of four times that length, which it was not
trained for. Retrieval is scored within the trained length, against the same model with a dense cache. Bits per byte are
bits per token over the bytes that a token of the text has on average.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.table import Table

import graphopt
from graphopt.analysis.interface import IntArray
from graphopt.decoding.decoder import Decoder
from graphopt.evaluate import negative_log_likelihood
from graphopt.models.stdlib_text import held_out_text
from graphopt.passes import CanonicalizeOptions, PageKVOptions, SparseKVOptions
from graphopt.recipe import Recipe
from graphopt.session import Session

Nats = npt.NDArray[np.float64]

STREAMING = SparseKVOptions(policy="streaming", sinks=16, recent=496)
RETRIEVAL = [
    SparseKVOptions(policy="retrieval", sinks=16, recent=64, budget=11, page=16, summary=summary)
    for summary in ("bounds", "mean")
]
TIMES_TRAINED = 4


def main(
    tokens: Annotated[int, typer.Option(min=4096, help="of held-out text, at most")] = 1 << 20,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here too")] = None,
) -> None:
    """Export the shipped model, make each variant, score each as the module says."""
    rows: list[tuple[str, int, Nats, int | None]] = []
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "float32"
        graphopt.export("stdlib_lm", source)
        plain = graphopt.load(source)
        ids = np.array(plain.encode(held_out_text())[:tokens], np.int64)
        bytes_of_token = len(plain.decode(ids.tolist()).encode()) / len(ids)
        trained = plain.max_positions or 0
        windows = _in_windows(plain, ids, trained)
        rows.append(("plain, windows of its trained length", trained, windows, None))
        endless = _optimized(source, Path(temporary) / "streaming", STREAMING)
        nats, largest = _as_one(endless, ids)
        rows.append((f"streaming, {STREAMING.sinks} first and {STREAMING.recent} newest", len(ids), nats, largest))
        beyond = ids[: TIMES_TRAINED * trained]
        for name, session in (
            ("plain, past its trained length", _without_limit(source, Path(temporary) / "paged")),
            ("streaming, the same tokens", endless),
        ):
            nats, largest = _as_one(session, beyond)
            rows.append((name, len(beyond), nats[-trained:], largest))
        for step in RETRIEVAL:
            session = _optimized(source, Path(temporary) / step.summary, step)
            read = step.sinks + step.recent + step.budget * (step.page or 0)
            name = f"retrieval by {step.summary}, at most {read} of {trained} tokens"
            rows.append((name, trained, _in_windows(session, ids, trained), None))
    table = Table("", "tokens of a sequence", "bits per byte", "cache, MB")
    found = []
    for what, sequence, nats, cache in rows:
        bits = float(nats.mean()) / math.log(2) / bytes_of_token
        table.add_row(what, str(sequence), f"{bits:.4f}", "" if cache is None else f"{cache / 1e6:.2f}")
        found.append({"what": what, "sequence": sequence, "scored": len(nats), "bits_per_byte": bits, "cache": cache})
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n")


def _optimized(source: Path, made: Path, step: SparseKVOptions) -> Session:
    graphopt.optimize(source, Recipe(name=step.policy, steps=(CanonicalizeOptions(), step)), made)
    return graphopt.load(made)


def _without_limit(source: Path, made: Path) -> Session:
    """Return the plain model, in pages, such that nothing stops a sequence where its training did."""
    graphopt.optimize(source, Recipe(name="paged", steps=(CanonicalizeOptions(), PageKVOptions())), made)
    session = graphopt.load(made)
    facts = session.manifest.model.model_copy(update={"max_positions": None})
    return replace(session, manifest=session.manifest.model_copy(update={"model": facts}))


def _as_one(session: Session, ids: IntArray) -> tuple[Nats, int]:
    """Return the nats of every token but the first, and the bytes of the largest cache."""
    decoder = Decoder(session, 1)
    nats, largest = [], 0
    for begin, logits in decoder.feed(ids[None, :-1]):
        nats.append(negative_log_likelihood(logits[0], ids[begin + 1 :][: logits.shape[1]]))
        largest = max(largest, decoder.cache.bytes)
    return np.concatenate(nats), largest


def _in_windows(session: Session, ids: IntArray, window: int) -> Nats:
    """Return the nats of every token but the first, each with half a window of context at least, where there is one."""
    nats = [np.empty(0)]
    for start in range(0, max(1, len(ids) - window // 2 - 1), window // 2):
        part = ids[start : start + window + 1]
        pieces = Decoder(session, 1).feed(part[None, :-1])
        scored = np.concatenate(
            [negative_log_likelihood(each[0], part[at + 1 :][: each.shape[1]]) for at, each in pieces]
        )
        nats.append(scored if start == 0 else scored[window - window // 2 :])
    return np.concatenate(nats)


if __name__ == "__main__":
    typer.run(main)
