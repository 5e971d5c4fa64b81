"""The command that collects statistics: ``calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphopt.cli.commands import command
from graphopt.cli.console import Jobs, Json, OnCluster, chosen_workers, out, print_json, progress

_COLUMNS = ("numbers", "tokens", "always 0", "rms", "largest", "kurtosis", "4 bits add")


@command("calibrate")
def calibrate(
    model: Annotated[Path, typer.Argument(help="an exported folder, or an .onnx file with a tokenizer beside it")],
    folder: Annotated[Path, typer.Option("-o", "--output", help="folder to keep statistics in")],
    recipe: Annotated[str, typer.Option("-r", "--recipe", help="a preset's name, or a YAML file")] = "int4",
    add: Annotated[list[str] | None, typer.Option("--add", help="a step to add at its place in the order")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--set", help="STEP.OPTION=VALUE: an option of a step, its value in YAML")
    ] = None,
    jobs: Jobs = None,
    cluster: OnCluster = None,
    as_json: Json = False,
) -> None:
    """Collect what a recipe needs to know of activations, by running the model: `optimize --statistics` reads it.

    Recipes that are alike up to the step quantize_weights share it. What was cut off goes on where it was.
    """
    from graphopt.compile.calibration.inputs import collect
    from graphopt.passes.recipe import load_recipe
    from graphopt.report.console_table import ConsoleTable, figure_columns

    with progress() as say, chosen_workers(jobs, cluster) as workers:
        statistics = collect(model, load_recipe(recipe, add or (), options or ()), folder, jobs=workers, on_stage=say)
    if as_json:
        return print_json(statistics)
    table = ConsoleTable(["input", *figure_columns(*_COLUMNS)])
    for inputs in statistics:
        figures = (f"{inputs.rows:,}", f"{inputs.tokens:,}", f"{inputs.dead:,}", f"{inputs.mean_square**0.5:.3g}")
        table.add_row(inputs.value, *figures, f"{inputs.largest:.3g}", f"{inputs.kurtosis:.1f}", f"{inputs.noise:.2%}")
    out.print(table)
    out.print(f"kept in {folder}: give it to `graphopt optimize` as --statistics", soft_wrap=True)
    return None
