"""Measure the cost of compiling a large model: memory, disk and time, stage by stage.

    python tools/bench/large.py llama-3.1-8b -r int4-rtn --no-verify               # whole
    python tools/bench/large.py llama-3.1-8b -r small --layers 4 --folder work     # killed, the same command goes on
    python tools/bench/large.py llama-3.1-70b -r small --layers 1,2 --windows 2    # a forecast from one layer
    python tools/bench/large.py llama-3.1-70b --no-compile                         # the export alone
    python tools/bench/large.py FOLDER -r small --layers 2                         # the model of a config.json

Weights are random and made on demand: none are on the disk in floating point. A model is never run as a whole: where
statistics are collected, parts of it run one after the other, and the weights of a part are rounded before the next one
runs. Verification does all of that again.

With ``--layers A,B`` a model of A and one of B layers are compiled, each in a process of its own. Their difference is
the cost of B - A layers, and the cost of all layers of the configuration is printed as a forecast.

With ``--folder`` the work of a run that is killed stays there, and the same command continues it.

Memory is the peak of resident memory that the system reports, pages of mapped files included.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt import optimize
from graphopt.analysis.structure.cost import weight_totals
from graphopt.artifact.artifact import Artifact
from graphopt.compile.replay import verify
from graphopt.passes.recipe import Recipe, load_recipe
from tools.bench.parts.machine import OtherLoad, describe
from tools.bench.parts.random_checkpoint import make_artifact
from tools.bench.parts.stages import Cost, Stages

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

# The shapes of https://huggingface.co/meta-llama/Llama-3.1-8B and -70B.
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
    "llama-3.1-70b": _LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
}

_GB = 1e9
# Seconds from which on a stage has a row of its own.
_ROW_SECONDS = 1.0


def compile_stages(artifact: Artifact, recipe: Recipe, folder: Path, stages: Stages, *, verifies: bool = True) -> int:
    """Compile a model without running it as a whole, and return how many bytes were written.

    Args:
        artifact: the model.
        recipe: what is done to it.
        folder: for all that is written; the result is ``output`` there.
        stages: takes what each stage costs.
        verifies: whether the result is verified too.
    """
    output = folder / "output"
    optimize(artifact, recipe, output, run="parts", on_stage=stages.progress_of("optimize"))
    bytes_written = sum(file.stat().st_size for file in output.iterdir())
    if verifies:
        verify(artifact, output, run="parts", on_stage=stages.progress_of("verify"))
    return bytes_written


def measure(config: dict[str, Any], recipe: Recipe | None, folder: Path, *, verifies: bool) -> dict[str, Any]:
    """Export a model of random weights in a folder, compile it, and return the cost of each stage.

    A run that is interrupted by SIGINT returns the stages until then.
    """
    source, temporary = folder / "source", folder / "temporary"
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
    for path in (source, temporary):
        path.mkdir(exist_ok=True)
    tempfile.tempdir = str(temporary.absolute())  # so that the disk that verification takes is counted
    load, stages, bytes_written = OtherLoad(), Stages(folder, print_cost), 0
    with stages.watch():
        stages.begin("export")
        artifact = make_artifact(config, source)
        if recipe is not None:
            with contextlib.suppress(KeyboardInterrupt):
                bytes_written = compile_stages(artifact, recipe, folder, stages, verifies=verifies)
    return {
        "layers": config["num_hidden_layers"],
        "parameters": weight_totals(artifact.model).parameters,
        "written": bytes_written,
        "progress": stages.progress,
        "others": load.share(),
        "stages": {name: cost.as_dict() for name, cost in stages.costs.items()},
        "parts": {name: cost.as_dict() for name, cost in stages.parts.items()},
    }


def print_cost(stage: str, cost: Cost) -> None:
    """Print the cost of a stage when it ends: a run that is killed prints no table."""
    if cost.seconds >= _ROW_SECONDS:
        figures = f"{cost.worked:.1f} s of processors, {cost.memory / _GB:.2f} GB of memory, {cost.disk / _GB:.2f} GB"
        print(f"{stage}: {cost.seconds:.1f} s, {figures} of disk", file=sys.stderr, flush=True)


def forecast(first: dict[str, Any], second: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the cost of a model of ``layers`` layers, extended from two with fewer: every layer costs the same."""

    def extend(low: Any, high: Any) -> Any:
        return low + (high - low) * (layers - first["layers"]) / (second["layers"] - first["layers"])

    stages = {}
    for name, larger_cost in second["stages"].items():
        smaller_cost = first["stages"].get(name, dict.fromkeys(larger_cost, 0))
        stages[name] = {kind: max(0.0, extend(smaller_cost[kind], larger_cost[kind])) for kind in larger_cost}
        stages[name]["memory"] = max(smaller_cost["memory"], larger_cost["memory"])
    totals = {key: extend(first[key], second[key]) for key in ("parameters", "written")}
    progress = f"from {first['layers']} and {second['layers']} layers"
    return {
        "layers": layers,
        "progress": progress,
        "others": max(first["others"], second["others"]),
        "stages": stages,
        **totals,
    }


def print_run(run: dict[str, Any], *, is_forecast: bool = False) -> None:
    """Print one model as a table."""
    count = run["parameters"]
    label = "forecast" if is_forecast else "measured"
    print(f"\n{label}: {run['layers']} layers, {count / 1e9:.2f} billion weights, {run['progress']}\n")
    print("| stage | seconds | of processors | ns of processors a weight | memory, GB | disk, GB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, cost in [*run["stages"].items(), *run.get("parts", {}).items()]:
        if cost["seconds"] < _ROW_SECONDS:
            continue
        print(
            f"| {name} | {cost['seconds']:.1f} | {cost['worked']:.1f} | {1e9 * cost['worked'] / count:.1f} | "
            f"{cost['memory'] / _GB:.2f} | {cost['disk'] / _GB:.2f} |"
        )
    costs = run["stages"].values()
    seconds, processor = (sum(cost[kind] for cost in costs) for kind in ("seconds", "worked"))
    memory, disk = (max(cost[kind] for cost in costs) for kind in ("memory", "disk"))
    print(
        f"| together | {seconds:.1f} | {processor:.1f} | {1e9 * processor / count:.1f} | {memory / _GB:.2f} | "
        f"{disk / _GB:.2f} |\n\n{run['written'] / _GB:.2f} GB written, {8 * run['written'] / count:.2f} bits a weight; "
        f"other processes took {run['others']:.0%} of the cores' time",
        flush=True,
    )


def main(
    model: Annotated[str, typer.Argument(help=f"{', '.join(MODELS)}, or a folder with a config.json")],
    recipe: Annotated[str, typer.Option("-r", "--recipe", help="what is done to it")] = "small",
    layers: Annotated[str | None, typer.Option(help="how many layers; two numbers for a forecast from both")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="another size, to see layers without their ends")] = None,
    windows: Annotated[int, typer.Option(help="windows of text that statistics are collected on")] = 2,
    window: Annotated[int, typer.Option(help="tokens of a window")] = 1024,
    work: Annotated[Path, typer.Option(help="where folders are made, and removed again")] = Path(),
    folder: Annotated[Path | None, typer.Option(help="a folder that stays, so that a killed run goes on there")] = None,
    verifies: Annotated[bool, typer.Option("--verify/--no-verify", help="verify the result too")] = True,
    compiles: Annotated[bool, typer.Option("--compile/--no-compile", help="compile what was exported")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="print one line of JSON for each model")] = False,
) -> None:
    """Compile a model of random weights, and print its cost."""
    config = dict(MODELS[model]) if model in MODELS else json.loads((Path(model) / "config.json").read_text())
    config |= {} if vocabulary is None else {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 1}
    counts = [int(number) for number in layers.split(",")] if layers else [config["num_hidden_layers"]]
    if len(counts) > 1:
        runs = []
        for count in counts:
            options = ["-r", recipe, "--layers", str(count), "--windows", str(windows), "--window", str(window)]
            options += [] if vocabulary is None else ["--vocabulary", str(vocabulary)]
            options += [] if compiles else ["--no-compile"]
            options += ["--work", str(work), "--verify" if verifies else "--no-verify", "--json"]
            command = [sys.executable, __file__, model, *options]
            runs.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
            print(json.dumps(runs[-1])) if as_json else print_run(runs[-1])
        total = forecast(runs[0], runs[-1], config["num_hidden_layers"])
        print(json.dumps(total)) if as_json else print_run(total, is_forecast=True)
        return
    full_recipe = load_recipe(recipe)
    calibration = full_recipe.calibration.model_copy(update={"windows": windows, "window": window})
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="large-", dir=work)))
        folder.mkdir(parents=True, exist_ok=True)
        run = measure(
            {**config, "num_hidden_layers": counts[0]},
            full_recipe.model_copy(update={"calibration": calibration}) if compiles else None,
            folder,
            verifies=verifies,
        )
    if as_json:
        print(json.dumps(run))
        return
    print(f"{model}, recipe {recipe}, {windows} windows of {window} tokens; {describe()}")
    print_run(run)


if __name__ == "__main__":
    typer.run(main)
