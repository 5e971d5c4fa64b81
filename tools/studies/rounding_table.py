"""Compare rounding methods: the divergence from the float model, by recipe and method, as a table in Markdown.

    graphopt export stdlib_lm -o float
    python tools/studies/rounding_table.py float

Every artifact is judged on held-out text (docs/quality.md); statistics are collected once for all recipes that share a
graph, on text that is not held out. A recipe may be followed by options:
"int4-rtn,quantize_weights.linear.format=int3".
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
import yaml

from graphopt.compile.pipeline import optimize
from graphopt.passes.recipe import Recipe, load_recipe
from graphopt.quantization.statistics.options import CalibrationOptions

_INT3 = "quantize_weights.linear.format=int3"
RECIPES = (
    *(recipe for name in ("fp6", "int4", "nf4") for recipe in (f"{name}-rtn", f"rotate-{name}")),
    f"int4-rtn,{_INT3}",
    f"rotate-int4-rtn,{_INT3}",
    "w4a8-rtn",
    "w4a4-rtn",
)
METHODS = ("nearest", "weighted", "gptq", "{method: gptq, order: natural}", "{method: gptq, sweeps: 2}")


def recipe_of(recipe: str, method: str, calibration: CalibrationOptions) -> Recipe:
    """Return a preset with its options, a rounding method and the text to calibrate on."""
    name, *options = recipe.split(",")
    preset = load_recipe(name, options=[*options, f"quantize_weights.rounding={method}"])
    return preset.model_copy(update={"calibration": calibration})


def title(method: str) -> str:
    """Return a method as the table's head names it: ``gptq, order: natural``."""
    content = yaml.safe_load(method)
    if isinstance(content, str):
        return content
    name = content.pop("method")
    return ", ".join([name, *(f"{key}: {value}" for key, value in content.items())])


def main(
    model: Annotated[Path, typer.Argument(help="an exported folder, in floating point")],
    recipe: Annotated[list[str] | None, typer.Option(help="presets, each with options after commas")] = None,
    method: Annotated[list[str] | None, typer.Option(help="values of `rounding` of quantize_weights")] = None,
    statistics: Annotated[Path | None, typer.Option(help="folder to keep statistics in")] = None,
    tokens: Annotated[int, typer.Option(help="of held-out text to judge on")] = 4096,
    windows: Annotated[int, typer.Option(help="windows of text to calibrate on")] = 64,
    text: Annotated[Path | None, typer.Option(help="text to calibrate on")] = None,
    jobs: Annotated[int, typer.Option(help="processes that evaluate weights")] = 1,
) -> None:
    """Compile a model by each recipe with each method, and print the divergences."""
    calibration = CalibrationOptions(text=text, windows=windows)
    methods = method or list(METHODS)
    print("| recipe | MB |", " | ".join(map(title, methods)), "|", flush=True)
    print("| --- |" + " --- |" * (len(methods) + 1), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name in recipe or RECIPES:
            cells: list[str] = []
            size = 0
            for method_name in methods:
                artifact = optimize(
                    model,
                    recipe_of(name, method_name, calibration),
                    Path(temporary) / "made",
                    overwrite=True,
                    jobs=jobs,
                    statistics=statistics or Path(temporary) / "statistics",
                    quality_tokens=tokens,
                    force=True,
                )
                figures = next(check.figures for check in artifact.manifest.checks if check.name == "quality")
                cells.append(f"{figures['kl_mean']:.4f}")
                size = sum(record.bytes for record in artifact.manifest.files.values())
            label = " ".join(part.rpartition("=")[2] for part in name.split(","))
            print(f"| {label} | {size / 1e6:.1f} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    typer.run(main)
