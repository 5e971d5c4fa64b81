"""Recipes on small denoisers of diffusers with random weights: exact passes, then whole sampling loops.

    python tools/studies/denoisers.py                         # all of tests/denoisers.py: six exports
    python tools/studies/denoisers.py dit,sd3 --recipes rotate,int8

Random weights show whether a graph compiles and how much exact passes change outputs. They do not show the loss of a
trained model by rounding: samples of a random denoiser diverge or are clipped at once, which real ones are not.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
import graphopt
from graphopt.compile.replay import verify
from tests.denoisers import DENOISERS, write_denoiser


def study(name: str, recipes: list[str], folder: Path) -> None:
    """Print a line for the export, and one for each recipe."""
    write_denoiser(name, folder / "checkpoint")
    export_manifest = graphopt.export(folder / "checkpoint", folder / "float32")
    print(f"{name:13} torch and graph differ by {export_manifest.checks[0].figures['largest_change']:.1e}", flush=True)
    for recipe in recipes:
        manifest = graphopt.optimize(folder / "float32", recipe, folder / recipe, force=True).manifest
        status = verify(folder / "float32", folder / recipe).checks[0].status
        changes = [check.figures.get("largest_change", 0.0) for check in manifest.checks if check.status == "measured"]
        quality = next((str(check.reason) for check in manifest.checks if check.name == "quality"), "")
        bits = 0.0 if manifest.weights is None else manifest.weights.bits_per_weight
        outcome = quality or f"exact, moved by {max(changes[1:], default=0.0):.1e}"
        print(f"{name:13} {recipe:7} {bits:5.2f} bits, {status}; {outcome}", flush=True)


def main(
    names: Annotated[str, typer.Argument(help="which, with commas between")] = ",".join(DENOISERS),
    recipes: Annotated[str, typer.Option(help="presets, with commas between")] = "rotate,int8,int4,small",
) -> None:
    """Try each denoiser with each recipe."""
    for name in names.split(","):
        with tempfile.TemporaryDirectory() as folder:
            study(name, recipes.split(","), Path(folder))


if __name__ == "__main__":
    typer.run(main)
