"""Measure the gain of int4 by rotation, over groups and seeds: bits per byte of the shipped model on held-out text.

python tools/studies/compare_rotations.py --seeds 5 --json rotations.json
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import graphopt
from graphopt.passes.algebra.fold_norms import FoldNorms
from graphopt.passes.algebra.rotate import Rotate
from graphopt.passes.codes.quantize_weights import LinearFormat, QuantizeWeights
from graphopt.passes.lift.canonicalize import Canonicalize
from graphopt.passes.recipe import Recipe
from graphopt.report.demo import MODULES
from graphopt.util.stdlib_text import held_out_text

GROUPS = (32, 64, 128)


def recipe(group: int, seed: int | None, value: bool) -> Recipe:
    """Return int4 in groups of ``group``, after a rotation drawn from ``seed``, or without one for ``None``."""
    options = Rotate(seed=seed or 0, value="hadamard" if value else None)
    rotation = () if seed is None else (FoldNorms(), options)
    linear = LinearFormat.model_validate({"group": group})
    steps = (Canonicalize(), *rotation, QuantizeWeights(linear=linear))
    return Recipe(name=f"int4 group {group} seed {seed}", steps=steps)


def main(
    seeds: Annotated[int, typer.Option(help="rotations to draw per group")] = 5,
    value: Annotated[bool, typer.Option(help="rotate values too, not only the residual")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here too")] = None,
) -> None:
    """Export the shipped model, make every variant, judge each on the text that the demo uses."""
    text = held_out_text(MODULES)
    rows = []
    table = Table("group", "int4", "rotated: median", "lowest", "highest", "cost gained back")
    with tempfile.TemporaryDirectory() as temporary:
        source, target = Path(temporary) / "float32", Path(temporary) / "int4"
        graphopt.export("stdlib_lm", source)
        floats = graphopt.evaluate(graphopt.load(source), text).bits_per_byte
        for group in GROUPS:
            bits = {}
            for seed in (None, *range(seeds)):
                graphopt.optimize(source, recipe(group, seed, value), target, overwrite=True)
                bits[seed] = graphopt.evaluate(graphopt.load(target), text).bits_per_byte
                rows.append({"group": group, "seed": seed, "bits_per_byte": bits[seed], "float32": floats})
            plain, rotated_bits = bits[None], [bits[seed] for seed in range(seeds)]
            median = statistics.median(rotated_bits)
            gain = (plain - median) / (plain - floats)
            figures = (plain, median, min(rotated_bits), max(rotated_bits))
            table.add_row(str(group), *(f"{figure:.4f}" for figure in figures), f"{gain:.0%}")
    console = Console()
    console.print(f"bits per byte; float32 needs {floats:.4f}")
    console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
