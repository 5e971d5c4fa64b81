"""Measure the gain of retrieval heads: calibrate, optimize with the result, and score the held-out text.

    python tools/studies/retrieval_heads.py                  # the shipped model; 13 minutes of processor time

The shipped model is calibrated on a module of its training text, and scored in windows of its trained length on
held-out modules. All variants stream 16 first and 64 newest tokens; they differ in which KV heads read more, and in
what these read. Controls choose as many heads, those of the lowest scores. The bytes are those that a decode step reads
of the caches of all layers at the end of a window: whole pages, and summaries where a head chooses pages.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import graphopt
from graphopt.analysis.structure.heads import HeadScores, Rank
from graphopt.analysis.structure.paged_caches import PagedLayer
from graphopt.compile.calibration.heads import calibrate
from graphopt.passes.cache.sparse_kv import SparseKV
from graphopt.passes.lift.canonicalize import Canonicalize
from graphopt.passes.recipe import Recipe
from graphopt.quality.evaluation import evaluate
from graphopt.runtime_ops.kv_attention.spec.attributes import RETRIEVAL, STREAMING
from graphopt.util.stdlib_text import held_out_text, training_texts

READ_OPTIONS: dict[str, Any] = {"sinks": 16, "recent": 64, "budget": 11, "page": 16}
CALIBRATED_ON = "argparse.py"
SHARES = (0.25, 0.5)


def main(
    characters: Annotated[int, typer.Option(min=10_000, help="of held-out text, at most")] = 1 << 20,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here too")] = None,
) -> None:
    """Export, calibrate, make each variant, score each as the module says."""
    rows: list[dict[str, Any]] = []
    table = Table("heads that read more", "what they read", "bits per byte", "bytes that a step reads")
    with tempfile.TemporaryDirectory() as temporary:
        source, text = Path(temporary) / "float32", held_out_text()[:characters]
        graphopt.export("stdlib_lm", source)
        options = SparseKV(**READ_OPTIONS)
        streaming = options.model_copy(update={"policy": "streaming"})
        calibration = calibrate(source, training_texts()[CALIBRATED_ON], streaming=streaming, retrieval=options)
        for number, (name, step) in enumerate(variants(calibration.scores)):
            folder = Path(temporary) / str(number)
            graphopt.optimize(source, Recipe(name="heads", steps=(Canonicalize(), step)), folder)
            session = graphopt.load(folder)
            window = session.manifest.model.max_positions or 0
            bits = evaluate(session, text, window=window).bits_per_byte
            size = sum(bytes_read(layer, window) for layer in session.interface.layers)
            table.add_row(name, step.policy, f"{bits:.4f}", f"{size:,}")
            rows.append({"heads": name, "reads": step.policy, "bits_per_byte": bits, "bytes": size})
    Console().print(table)
    if json_file is not None:
        json_file.write_text(
            json.dumps({"scores": calibration.scores.model_dump(mode="json"), "rows": rows}, indent=2) + "\n"
        )


def variants(scores: HeadScores) -> list[tuple[str, SparseKV]]:
    """Return the compared variants with their names."""
    variant_list = [("all", SparseKV(policy=policy, **READ_OPTIONS)) for policy in ("dense", "retrieval")]
    variant_list.append(("none", SparseKV(policy="streaming", **READ_OPTIONS)))
    ranks: list[tuple[Rank, HeadScores]] = [("razor", scores), ("mass", scores), ("mass", worst(scores))]
    for share in SHARES:
        for rank, head_scores in ranks:
            name = (
                f"{share:.0%} by {rank}" if head_scores is scores else f"{share:.0%}, those that lose least (control)"
            )
            for policy in ("dense", "retrieval"):
                step = SparseKV(policy=policy, heads=head_scores, rank=rank, retrieval_share=share, **READ_OPTIONS)
                variant_list.append((name, step))
    return variant_list


def worst(scores: HeadScores) -> HeadScores:
    """Return scores that order heads the other way round."""
    layers = {
        number: tuple(head.model_copy(update={"lost": 1 - head.lost}) for head in heads)
        for number, heads in scores.layers.items()
    }
    return scores.model_copy(update={"layers": layers})


def bytes_read(layer: PagedLayer, tokens: int) -> int:
    """Return the most bytes that a new token reads of a row's cache of ``tokens`` tokens, in pages of floats."""
    kv, pages = layer.attributes, -(-tokens // layer.attributes.page)
    state = kv.state(1, 1, layer.head_size)
    page_bytes = (state.keys.bytes + state.values.bytes) // kv.kv_heads
    newest = min(pages, -(-kv.recent // kv.page) + 1)
    fixed_pages = min(pages, kv.first_pages + newest)
    total = 0
    for head in range(kv.kv_heads):
        policy = kv.policy(head)
        if policy == STREAMING:
            total += fixed_pages * page_bytes
        elif policy == RETRIEVAL:
            total += min(pages, fixed_pages + kv.budget) * page_bytes + pages * state.summaries.bytes // kv.kv_heads
        else:
            total += pages * page_bytes
    return total


if __name__ == "__main__":
    typer.run(main)
