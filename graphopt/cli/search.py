"""The commands that find a recipe by measuring: formats, storages of caches, rotary factors for longer contexts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphopt.cli.commands import command
from graphopt.cli.console import Inputs, Jobs, Json, OnCluster, bytes_of, chosen_workers, out, print_json, progress
from graphopt.errors import InputError

if TYPE_CHECKING:
    from graphopt.compile.search import FloatWeights


@command("search")
def search(
    model: Annotated[
        Path,
        typer.Argument(help="an exported folder or an .onnx file; of one that makes text, with a tokenizer beside it"),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="the recipe to write, a YAML file")],
    size: Annotated[
        str | None, typer.Option("--bytes", help="what all weights may take, such as 80MB; by default as in the recipe")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "-r",
            "--recipe",
            help="what to do besides: preset or YAML file; by default small, or int8 for a model that makes no text",
        ),
    ] = None,
    require: Annotated[
        str | None,
        typer.Option(help="of a model that makes no text: what its outputs must be like; by default cosine>=0.99"),
    ] = None,
    inputs: Inputs = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="to choose from, such as nl4:64: a format and its group")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="of the calibration text to measure single matrices on")] = 512,
    mixture_tokens: Annotated[int, typer.Option(min=2, help="of it to judge the best mixtures on")] = 2048,
    candidates: Annotated[
        int, typer.Option(min=0, help="mixtures to judge by the model as a whole; 0: by single matrices alone")
    ] = 128,
    seed: Annotated[int, typer.Option(help="of the draws of mixtures")] = 0,
    work: Annotated[
        Path | None, typer.Option("--work", help="folder of measurements; by default .OUTPUT-search beside OUTPUT")
    ] = None,
    jobs: Jobs = None,
    cluster: OnCluster = None,
    as_json: Json = False,
) -> None:
    """Find the format of each matrix with which the model diverges least in a number of bytes; write a recipe.

    Each matrix is rounded alone and the model run with it; of a mixture of experts those of all experts at once, and
    each expert counts as often as the calibration text reaches it. Then mixtures of formats are drawn and judged by
    what the whole model loses. What is measured is kept: a search that was cut off goes on where it was.

    Of a model that makes no text it finds the weights that have to stay in floats, as few as meet --require; tokens,
    candidates and the seed are for texts.
    """
    from graphopt.artifact.artifact import read
    from graphopt.compile.search import CHOICES, MixtureSearch
    from graphopt.compile.search import search as find
    from graphopt.compile.search.choices import choice_of, name_of
    from graphopt.report.console_table import ConsoleTable, figure_columns
    from graphopt.tasks import TASKS

    room, folder = bytes_of(size), work or output.parent / f".{output.name}-search"
    if not TASKS[read(model).manifest.task].generates:
        if formats:
            raise InputError(
                "formats are chosen for models that make text; of others weights may stay in floats",
                file=model,
                remedy="leave --format out, and choose a recipe by -r",
            )
        if jobs is not None or cluster is not None:
            raise InputError(
                "--jobs and --cluster are for models that make text; weights that stay in floats are searched here",
                file=model,
                remedy="leave them out",
            )
        return _search_float_weights(model, output, folder, recipe, require, room, inputs, as_json=as_json)
    if require is not None or inputs is not None:
        raise InputError(
            "--require and --inputs are for models that make no text; of this one divergence is searched on text",
            file=model,
            remedy="leave them out, and say how many bytes there are by --bytes",
        )
    choices = [choice_of(text) for text in formats] if formats else CHOICES
    with progress() as say, chosen_workers(jobs, cluster) as workers:
        result = find(
            model,
            room,
            folder,
            recipe=recipe or "small",
            choices=choices,
            tokens=tokens,
            mixtures=MixtureSearch(candidates=candidates, tokens=mixture_tokens, seed=seed),
            jobs=workers,
            on_stage=say,
        )
    output.write_text(result.recipe.to_yaml(), encoding="utf-8")
    if as_json:
        return print_json(result)
    table = ConsoleTable(["format", *figure_columns("matrices")])
    for name, count in sorted(Counter(name_of(choice) for choice in result.chosen.values()).items()):
        table.add_row(name, str(count))
    out.print(table)
    count = result.judged_mixtures
    summary = f"divergence {result.loss:.4f} nats per token on calibration text, the best of {count} mixtures"
    if not count:
        summary = f"expected divergence {result.loss:.4f} nats per token"
    if result.recipe_loss is not None:
        summary += f"; {result.recipe_loss:.4f} with the formats of the recipe"
    out.print(f"{output}: about {result.bytes / 1e6:.1f} MB, {summary}", soft_wrap=True)
    if result.held_out_loss is not None:
        summary = f"on text that the search has not read: divergence {result.held_out_loss:.4f}"
        if result.recipe_held_out_loss is not None:
            summary += f"; {result.recipe_held_out_loss:.4f} with the formats of the recipe"
        out.print(summary, soft_wrap=True)
    if result.rare:
        name, tokens = min(result.rare.items(), key=lambda item: item[1])
        out.print(
            f"{len(result.rare)} matrices of experts are of too few tokens of the calibration text to be measured, "
            f"{name} of {tokens}: they cost what a mean expert of their mixture costs, and are rounded to nearest",
            soft_wrap=True,
        )
    return None


def _search_float_weights(
    model: Path,
    output: Path,
    folder: Path,
    recipe: str | None,
    require: str | None,
    size: int | None,
    inputs: Path | None,
    *,
    as_json: bool,
) -> None:
    """Find the weights of a model that stay in floats, write the recipe, and print what it makes.

    Raises:
        typer.Exit: with 1, where no choice within the bytes meets what is required.
    """
    from graphopt.compile.search import search_float_weights
    from graphopt.compile.search.float_weights import RECIPE, REQUIREMENT
    from graphopt.quality.verdict import Requirement

    requirement = REQUIREMENT if require is None else Requirement.parse(require)
    with progress() as say:
        result = search_float_weights(
            model,
            folder,
            recipe=recipe or RECIPE,
            requirement=requirement,
            size=size,
            inputs=inputs,
            on_stage=say,
        )
    output.write_text(result.recipe.to_yaml(), encoding="utf-8")
    if as_json:
        print_json(result)
    else:
        _print_float_weights(output, result)
    if result.unmet:
        raise typer.Exit(1)


def _print_float_weights(output: Path, result: FloatWeights) -> None:
    """Print what weights cost, those that stay in floats, and what the outputs are like."""
    from graphopt.report.console_table import ConsoleTable, figure_columns

    table = ConsoleTable(["weight", "", *figure_columns("error alone")])
    for name, cost in result.costs.items():
        if name in result.best_trial.floats:
            table.add_row(name, "in floats", f"{cost:.2g}")
    if result.best_trial.floats:
        out.print(table)
    before, after = result.recipe_trial, result.best_trial
    out.print(
        f"{output}: {len(after.floats)} of {len(result.costs)} weights in floats, {after.bytes / 1e6:.2f} MB instead "
        f"of {before.bytes / 1e6:.2f}: cosine {after.figures['cosine_mean']:.4f} instead of "
        f"{before.figures['cosine_mean']:.4f}, on {result.samples} samples",
        soft_wrap=True,
    )
    for reason in result.unmet:
        out.print(f"not met: {reason}; more bytes, or another recipe, may", soft_wrap=True)


@command("search-rope")
def search_rope(
    model: Annotated[Path, typer.Argument(help="an exported folder, or an .onnx file with a tokenizer beside it")],
    factor: Annotated[float, typer.Option(help="how many times the positions that the model has")],
    output: Annotated[Path, typer.Option("-o", "--output", help="the recipe to write, a YAML file")],
    text: Annotated[Path | None, typer.Option(help="UTF-8 file to measure on; by default Python's own source")] = None,
    texts: Annotated[int, typer.Option(min=1, help="sequences to measure on, each of the whole length")] = 4,
    population: Annotated[int, typer.Option(min=2, help="candidates of the first generation")] = 64,
    mutations: Annotated[int, typer.Option(min=0, help="mutated candidates of each generation")] = 16,
    crossovers: Annotated[int, typer.Option(min=0, help="crossed candidates of each generation")] = 16,
    generations: Annotated[int, typer.Option(min=0, help="generations behind the first one")] = 40,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    work: Annotated[
        Path | None, typer.Option("--work", help="folder of measurements; by default .OUTPUT-search beside OUTPUT")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the rotary factors with which a model predicts text best beyond its trained length; write a recipe.

    LongRoPE's evolutionary search: what each frequency is divided by, and how many first tokens are left as they were.
    What is measured is kept: a search that was cut off goes on where it was.
    """
    from graphopt.compile.search import Evolution
    from graphopt.compile.search import search_rope as find
    from graphopt.report.console_table import ConsoleTable, figure_columns

    folder = work or output.parent / f".{output.name}-search"
    parents = max(2, population // 2)
    evolution = Evolution(
        population=population,
        parents=parents,
        mutations=mutations,
        crossovers=crossovers,
        generations=generations,
        seed=seed,
    )
    with progress() as say:
        result = find(model, factor, folder, evolution=evolution, texts=texts, text=text, on_stage=say)
    output.write_text(result.recipe.to_yaml(), encoding="utf-8")
    if as_json:
        return print_json(result)
    table = ConsoleTable(["", *figure_columns("nats per token beyond the trained length")])
    for name, nats in (*result.starts.items(), ("searched", result.nats)):
        table.add_row(name, f"{nats:.4f}")
    out.print(table)
    out.print(f"{output}: {result.measured} candidates measured", soft_wrap=True)
    return None


@command("search-cache")
def search_cache(
    model: Annotated[Path, typer.Argument(help="an exported folder, or an .onnx file with a tokenizer beside it")],
    output: Annotated[Path, typer.Option("-o", "--output", help="the recipe to write, a YAML file")],
    recipe: Annotated[
        str, typer.Option("-r", "--recipe", help="what to do: preset or YAML file with a step quantize_kv")
    ] = "rotate-kv4",
    token_bytes: Annotated[
        float | None,
        typer.Option("--token-bytes", help="what a token may take in all layers; by default as in the recipe"),
    ] = None,
    storages: Annotated[
        list[str] | None,
        typer.Option("--storage", help="to choose from; by default all integers, int8 to int1"),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 file to measure on; by default Python's own source")] = None,
    window: Annotated[int, typer.Option(min=2, help="tokens of a window of it")] = 1024,
    windows: Annotated[int, typer.Option(min=1, help="windows, spaced over the text")] = 2,
    work: Annotated[
        Path | None, typer.Option("--work", help="folder of measurements; by default .OUTPUT-search beside OUTPUT")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the storages of each layer's cache with which the model diverges least in some bytes; write a recipe.

    Keys alone and values alone of each layer are stored as int2, and the model is run: two runs for each layer. That is
    kept: a search that was cut off goes on where it was, and one for other bytes measures no layer again. Up to three
    answers are then judged by the model on a window four times as long.
    """
    from graphopt.compile.search import MEASURED_STORAGE, STORAGES, search_caches
    from graphopt.quantization.statistics.options import CalibrationOptions
    from graphopt.report.console_table import ConsoleTable, figure_columns

    folder = work or output.parent / f".{output.name}-search"
    with progress() as say:
        result = search_caches(
            model,
            folder,
            recipe=recipe,
            room=token_bytes,
            storages=storages or STORAGES,
            texts=CalibrationOptions(text=text, window=window, windows=windows),
            on_stage=say,
        )
    output.write_text(result.recipe.to_yaml(), encoding="utf-8")
    if as_json:
        return print_json(result)
    columns = figure_columns(*(f"{part} alone as {MEASURED_STORAGE}" for part in ("keys", "values")))
    table = ConsoleTable(["layer", "keys", "values", *columns])
    for row in result.losses:
        keys, values = result.layers[row.layer]
        table.add_row(str(row.layer), keys, values, f"{row.keys:.5f}", f"{row.values:.5f}")
    out.print(table)
    out.print(
        f"{output}: {result.bytes:,.0f} bytes of a token, divergence {result.loss:.4f} nats on held-out text; with the "
        f"storages of the recipe {result.recipe_bytes:,.0f} bytes and {result.recipe_loss:.4f}",
        soft_wrap=True,
    )
    return None
