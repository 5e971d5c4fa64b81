"""Commands that make an artifact or prove one: ``demo``, ``export``, ``optimize``, ``verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from graphopt.cli.commands import command
from graphopt.cli.console import (
    Inputs,
    Jobs,
    Json,
    NoRun,
    OnCluster,
    Output,
    Overwrite,
    PartSize,
    ShowAll,
    StatisticsFolder,
    WorkFolder,
    bytes_of,
    chosen_workers,
    out,
    print_json,
    progress,
)
from graphopt.util.targets import ChosenTarget

if TYPE_CHECKING:
    from graphopt.artifact.manifest import Manifest


@command("demo")
def demo(output: Output = Path("graphopt-demo"), as_json: Json = False) -> None:
    """Export, rotate, quantize, check and run the model that ships with graphopt."""
    from graphopt.report.console_table import ConsoleTable, figure_columns
    from graphopt.report.demo import PROMPT, run_demo
    from graphopt.report.sentences import sentence
    from graphopt.report.tables import size_text

    with progress() as say:
        result = run_demo(output, say)
    if as_json:
        return print_json(result)
    names = figure_columns("size", "bits per weight", "bits per byte", "logit change")
    table = ConsoleTable(["stage", *names, "product inputs", *figure_columns("seconds")])
    for stage in result.stages:
        table.add_row(
            stage.name,
            size_text(stage.bytes),
            f"{stage.bits_per_weight:.2f}",
            f"{stage.bits_per_byte:.4f}",
            f"{stage.largest_logit_change:.1e}",
            stage.activations,
            f"{stage.seconds:.1f}",
        )
    out.print(table)
    out.print(
        f"bits per byte: on {result.held_out_bytes:,} bytes of standard-library source that training never saw; "
        f"xz -9e needs {result.xz_bits_per_byte:.4f}"
    )
    stage_with_proof = next((stage for stage in result.stages if stage.proof is not None), result.stages[-1])
    if stage_with_proof.proof is not None:
        out.print(f"\n{stage_with_proof.name} is proved: {sentence(stage_with_proof.proof)}", highlight=False)
    for stage in (result.stages[0], result.stages[-1]):
        out.print(f"\n[bold]{stage.name}[/bold] completes:")
        out.print(PROMPT + stage.completion, markup=False, highlight=False)
    last = result.stages[-1].folder
    out.print(f'\nwritten: {last}. Try: graphopt run {last} --prompt "class Stack:"', soft_wrap=True)
    out.print(f"what was done to it: {result.report} opens in any browser", soft_wrap=True)


@command("export")
def export(
    model: Annotated[
        str, typer.Argument(help="a shipped model, a Hugging Face folder or hub id, a .gguf or .onnx file")
    ],
    output: Output,
    overwrite: Overwrite = False,
    no_run: NoRun = False,
    no_weights: Annotated[
        bool, typer.Option("--no-weights", help="the graph alone, of a config.json: to look at, not to run")
    ] = False,
    part_size: PartSize = None,
    mtp: Annotated[
        bool,
        typer.Option("--mtp", help="also the layer that predicts one more token, which drafts in `graphopt run`"),
    ] = False,
    show_all: ShowAll = False,
    as_json: Json = False,
) -> None:
    """Bring a model in as ONNX: one graph for prefill and decode, with its tokenizer."""
    from graphopt.models.export import export as run_export

    with progress() as say:
        manifest = run_export(
            model,
            output,
            overwrite=overwrite,
            run=not no_run,
            weights=not no_weights,
            part_size=bytes_of(part_size),
            mtp=mtp,
            on_stage=say,
        )
    report_artifact(output, manifest, show_all, as_json)


@command("optimize")
def optimize(
    model: Annotated[Path, typer.Argument(help="an exported folder, or an .onnx file")],
    output: Output,
    recipe: Annotated[str, typer.Option("-r", "--recipe", help="a preset's name, or a YAML file")] = "int4",
    target: Annotated[
        ChosenTarget | None,
        typer.Option(
            help="what the model will run on: adds the step `lower`, or sets its target; ort-... also merges products; "
            "ort-cpu chooses kernels for this machine, ort-cpu:avx2 for another instruction set"
        ),
    ] = None,
    last_logits: Annotated[
        int,
        typer.Option(
            "--last-logits",
            min=0,
            help="logits of so many last positions only: 1 to generate, 12 to check drafts too; 0 for all, to evaluate",
        ),
    ] = 0,
    float16: Annotated[
        bool, typer.Option("--float16", help="compute in float16, for GPUs: adds the step `float16`")
    ] = False,
    add: Annotated[list[str] | None, typer.Option("--add", help="a step to add at its place in the order")] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", help="STEP.OPTION=VALUE: an option of a step, its value in YAML"),
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option("--kv-memory", help="memory for the caches of all requests, such as 4GB, of `serve`")
    ] = None,
    jobs: Jobs = None,
    cluster: OnCluster = None,
    work: WorkFolder = None,
    statistics: StatisticsFolder = None,
    shard: Annotated[
        str | None,
        typer.Option(help="I/N: only evaluate share I of N of the weights, for `graphopt assemble` to write the model"),
    ] = None,
    overwrite: Overwrite = False,
    no_run: NoRun = False,
    quality_tokens: Annotated[
        int, typer.Option(min=0, help="tokens of held-out text that a lossy result is judged on; 0 for none")
    ] = 1024,
    require: Annotated[
        str | None,
        typer.Option(help='what its quality must be to be written, such as "kl<0.05, same_first_choice>0.9"'),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="write a model that is judged to be broken, too")] = False,
    inputs: Inputs = None,
    part_size: PartSize = None,
    show_all: ShowAll = False,
    as_json: Json = False,
) -> None:
    """Apply a recipe, check every pass, and write the folder that an app deploys."""
    from graphopt.compile.pipeline import chosen_recipe
    from graphopt.compile.pipeline import optimize as run_optimize
    from graphopt.passes.recipe import load_recipe

    settings = [*(options or ()), *([f"serve.memory={kv_memory}"] if kv_memory is not None else [])]
    full_recipe = chosen_recipe(load_recipe(recipe, add or (), settings), target, last_logits, float16, inputs)
    if shard is not None:
        from graphopt.compile.shards import evaluate_shard, parse_shard

        number, shards = parse_shard(shard)
        with progress() as say, chosen_workers(jobs, cluster) as workers:
            folder = evaluate_shard(
                model,
                full_recipe,
                output,
                number,
                shards,
                overwrite=overwrite,
                jobs=workers,
                work=work,
                statistics=statistics,
                on_stage=say,
            )
        if as_json:
            return print_json([{"shard": shard, "work": str(folder)}])
        return out.print(f"shard {shard} is evaluated: {folder}", highlight=False, soft_wrap=True)
    with progress() as say, chosen_workers(jobs, cluster) as workers:
        artifact = run_optimize(
            model,
            full_recipe,
            output,
            overwrite=overwrite,
            run=not no_run,
            jobs=workers,
            work=work,
            quality_tokens=quality_tokens,
            require=require,
            force=force,
            statistics=statistics,
            part_size=bytes_of(part_size),
            on_stage=say,
        )
    return report_artifact(output, artifact.manifest, show_all, as_json)


@command("assemble")
def assemble(
    output: Output,
    jobs: Jobs = None,
    cluster: OnCluster = None,
    work: WorkFolder = None,
    statistics: StatisticsFolder = None,
    overwrite: Overwrite = False,
    no_run: NoRun = False,
    part_size: PartSize = None,
    show_all: ShowAll = False,
    as_json: Json = False,
) -> None:
    """Check and write the model whose weights all of `optimize --shard` have evaluated."""
    from graphopt.compile.shards import assemble as run_assemble

    with progress() as say, chosen_workers(jobs, cluster) as workers:
        artifact = run_assemble(
            output,
            overwrite=overwrite,
            run=not no_run,
            jobs=workers,
            work=work,
            statistics=statistics,
            part_size=bytes_of(part_size),
            on_stage=say,
        )
    report_artifact(output, artifact.manifest, show_all, as_json)


@command("verify")
def verify(
    before: Annotated[Path, typer.Argument(help="the artifact that AFTER was made from")],
    after: Annotated[Path, typer.Argument(help="an artifact that `graphopt optimize` wrote")],
    no_run: NoRun = False,
    statistics: StatisticsFolder = None,
    inputs: Inputs = None,
    show_all: Annotated[bool, typer.Option("--all", help="list each finding of each check")] = False,
    as_json: Json = False,
) -> None:
    """Prove again, from the two folders alone, that AFTER computes what BEFORE computes."""
    from graphopt.compile.replay import verify as run_verify
    from graphopt.report.tables import checks_table, findings_table

    with progress() as say:
        proof = run_verify(before, after, run=not no_run, statistics=statistics, inputs=inputs, on_stage=say)
    if as_json:
        return print_json(proof)
    out.print(checks_table(proof.checks))
    findings = findings_table(proof.checks) if show_all else None
    if findings is not None:
        out.print(findings)
    return None


def report_artifact(folder: Path, manifest: Manifest, show_all: bool, as_json: bool) -> None:
    """Print what an artifact is and how it came to be."""
    from graphopt.report.tables import passes_table, skips_table, summary

    if as_json:
        return print_json(manifest)
    if manifest.passes:
        out.print(passes_table(manifest))
        skips = skips_table(manifest.passes, is_folded=not show_all)
        if skips is not None:
            out.print(skips)
    for line in summary(manifest):
        out.print(escape(line), highlight=False)
    for name, task in parts_of(manifest, folder).items():
        out.print(f"{folder / name}: {task}, an artifact of its own", soft_wrap=True)
    out.print(f"written: {folder}", soft_wrap=True)
    return None


def parts_of(manifest: Manifest, folder: Path) -> dict[str, str]:
    """Return what the other graphs of an artifact are, by their folders."""
    from graphopt.artifact.manifest import read_manifest
    from graphopt.tasks import TASKS

    return {name: TASKS[read_manifest(folder / name).task].noun for name in manifest.parts}
