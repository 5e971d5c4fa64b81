"""Measure models with sparse caches: on text far beyond the trained length, and reading a part of the tokens within it.

    python tools/studies/long_text.py                         # the shipped model; 5 minutes on two cores
    python tools/studies/long_text.py --tokens 20000 --json long_text.json

Streaming scores the whole text as one sequence, and its cache must not grow. The plain model is scored in windows of
its trained length, which suits it best, and then as one sequence of four times that length, which it is not trained
for. Retrieval is scored within the trained length, beside the same model with a dense cache. Bits per byte are bits per
token over the bytes that a token of the text has on average.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.passes.cache.page_kv import PageKV
from graphopt.passes.cache.sparse_kv import SparseKV
from graphopt.passes.lift.canonicalize import Canonicalize
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
RETRIEVAL = [
    SparseKV(policy="retrieval", sinks=16, recent=64, budget=11, page=16, summary=summary)
    for summary in ("bounds", "mean")
]
TIMES_TRAINED = 4


def main(
    tokens: Annotated[int, typer.Option(min=4096, help="of held-out text, at most")] = 1 << 20,
    json_file: JsonFile = None,
) -> None:
    """Export the shipped model, make each variant, score each as the module says."""
    rows: list[tuple[str, int, Nats, int | None]] = []
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "float32"
        plain, text = open_shipped_model(source, tokens)
        ids, trained_length = text.ids, plain.max_positions or 0
        rows.append(
            ("plain, windows of its trained length", trained_length, nats_in_windows(plain, ids, trained_length), None)
        )
        endless = optimize_artifact(source, Path(temporary) / "streaming", Canonicalize(), STREAMING)
        nats, largest = as_one(endless, ids)
        rows.append((f"streaming, {STREAMING.sinks} first and {STREAMING.recent} newest", len(ids), nats, largest))
        paged_session = optimize_artifact(source, Path(temporary) / "paged", Canonicalize(), PageKV())
        long_ids = ids[: TIMES_TRAINED * trained_length]
        for name, session in (
            ("plain, past its trained length", without_limit(paged_session)),
            ("streaming, the same tokens", endless),
        ):
            nats, largest = as_one(session, long_ids)
            rows.append((name, len(long_ids), nats[-trained_length:], largest))
        for step in RETRIEVAL:
            session = optimize_artifact(source, Path(temporary) / step.summary, Canonicalize(), step)
            tokens_read = step.sinks + step.recent + step.budget * (step.page or 0)
            name = f"retrieval by {step.summary}, at most {tokens_read} of {trained_length} tokens"
            rows.append((name, trained_length, nats_in_windows(session, ids, trained_length), None))
    table = Table("", "tokens of a sequence", "bits per byte", "cache, MB")
    json_rows = []
    for title, sequence, nats, cache in rows:
        bits = text.bits_per_byte(nats)
        table.add_row(title, str(sequence), f"{bits:.4f}", "" if cache is None else f"{cache / 1e6:.2f}")
        json_rows.append(
            {"what": title, "sequence": sequence, "scored": len(nats), "bits_per_byte": bits, "cache": cache}
        )
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(json_rows, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
