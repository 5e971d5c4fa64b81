"""Commands that compare models by what they say of text: ``quality``, ``table``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphopt.cli.commands import command
from graphopt.cli.console import (
    Inputs,
    Jobs,
    Json,
    OnCluster,
    chosen_workers,
    out,
    print_json,
    progress,
    read_text,
    write_text,
)
from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.quality.losses import Losses

Texts = Annotated[Path | None, typer.Option("--text", help="a UTF-8 file to read; by default what ships with Python")]
Tokens = Annotated[int, typer.Option(min=2, help="tokens to score")]
Window = Annotated[int, typer.Option(min=2, help="tokens that are seen at once")]


@command("quality")
def quality(
    before: Annotated[Path, typer.Argument(help="the artifact that the others were made from")],
    after: Annotated[list[Path], typer.Argument(help="artifacts to compare with it")],
    text: Texts = None,
    tokens: Tokens = 4096,
    window: Window = 512,
    locate_losses: Annotated[
        bool, typer.Option("--where", help="also measure where quality was lost: layer by layer, and what to do")
    ] = False,
    recipe: Annotated[
        Path | None,
        typer.Option(help="with --where: write a recipe that leaves in floats what is worth most for its bytes"),
    ] = None,
    inputs: Inputs = None,
    jobs: Jobs = None,
    cluster: OnCluster = None,
    as_json: Json = False,
) -> None:
    """Compare models with the one that they were made from, on text: KL divergence, first choices, a verdict."""
    from graphopt.compile.comparisons import Reading, compare_folders

    if recipe is not None and not locate_losses:
        raise InputError("--recipe needs to know where quality was lost", remedy="add --where")
    if recipe is not None and len(after) > 1:
        raise InputError(f"--recipe is for one model, and there are {len(after)}", remedy="give one after BEFORE")
    texts = None if text is None else [read_text(text)]
    reading = Reading(texts, tokens, window, inputs)
    with progress() as say, chosen_workers(jobs, cluster) as workers:
        comparisons = compare_folders(before, after, reading, locate_losses=locate_losses, jobs=workers, on_stage=say)
    rows = [(str(folder), comparison.figures) for folder, comparison in zip(after, comparisons, strict=True)]
    reports = [comparison.losses for comparison in comparisons if comparison.losses is not None]
    if recipe is not None:
        if reports[0].recipe is None:
            raise InputError("no better recipe: no layer and no kind of product brings back a tenth of the loss")
        write_text(recipe, reports[0].recipe.to_yaml())
    if as_json:
        extras = [{"where": report.model_dump(mode="json")} for report in reports] or [{}] * len(rows)
        return print_json(
            [{"model": name, **figures, **extra} for (name, figures), extra in zip(rows, extras, strict=True)]
        )
    return _print_quality(rows, reports)


def _print_quality(rows: Sequence[tuple[str, dict[str, float]]], reports: Sequence[Losses]) -> None:
    """Print the figures of models, and where each lost quality if that was measured."""
    from graphopt.report.losses import errors_table, groups_table, spread_table, summary_lines
    from graphopt.report.tables import quality_table

    out.print(quality_table(rows))
    for (name, _), report in zip(rows, reports, strict=False):
        out.print(f"where {name} loses quality:", markup=False, highlight=False, soft_wrap=True)
        for table in (errors_table(report), spread_table(report), groups_table(report)):
            if table is not None:
                out.print(table)
        for line in summary_lines(report):
            out.print(line, markup=False, highlight=False, soft_wrap=True)


@command("table")
def table(
    model: Annotated[Path, typer.Argument(help="an exported folder, or an .onnx file")],
    recipes: Annotated[list[str], typer.Argument(help="presets' names, or YAML files")],
    keep: Annotated[Path | None, typer.Option(help="a folder to keep the artifacts in")] = None,
    text: Texts = None,
    tokens: Tokens = 4096,
    window: Window = 512,
    exercises: Annotated[
        int, typer.Option(min=0, help="of each kind that models complete, judged by exact match; 0 for none")
    ] = 0,
    jobs: Jobs = None,
    cluster: OnCluster = None,
    as_json: Json = False,
) -> None:
    """Make a model by several recipes, and print bytes, bits, quality and the time of reading the text for each.

    With exercises, the first row of figures is that of the model itself.
    """
    from graphopt.compile.comparisons import Reading, table_rows
    from graphopt.passes.recipe import load_recipe
    from graphopt.quality.exact_match import exact_matches
    from graphopt.report.console_table import ConsoleTable, figure_columns
    from graphopt.report.tables import quality_table, size_text

    texts = None if text is None else [read_text(text)]
    reference = exact_matches(model, exercises) if exercises else {}
    with (
        tempfile.TemporaryDirectory(prefix="graphopt-table-") as temporary,
        progress() as say,
        chosen_workers(jobs, cluster) as workers,
    ):
        results = table_rows(
            model,
            [load_recipe(name) for name in recipes],
            keep or Path(temporary),
            Reading(texts, tokens, window),
            exercises=exercises,
            jobs=workers,
            on_stage=say,
        )
    rows = [(row.recipe, row.figures) for row in results]
    sizes = [(row.bytes, row.bits, row.seconds) for row in results]
    if as_json:
        keys = ("bytes", "bits_per_weight", "seconds_to_make")
        return print_json(
            [
                {
                    "recipe": name,
                    **dict(zip(keys, size, strict=True)),
                    **figures,
                    **{f"reference_{kind}": share for kind, share in reference.items()},
                }
                for (name, figures), size in zip(rows, sizes, strict=True)
            ]
        )
    artifacts = ConsoleTable(["recipe", *figure_columns("size", "bits per weight", "seconds to make")])
    for (name, _), (size, bits, seconds) in zip(rows, sizes, strict=True):
        artifacts.add_row(name, size_text(size), f"{bits:.2f}", f"{seconds:.1f}")
    out.print(artifacts)
    return out.print(quality_table([*([(model.name, reference)] if reference else []), *rows]))
