"""Decode and prefill of a whole model, graphopt beside onnxruntime-genai and llama.cpp, in interleaved rounds.

    python tools/bench/models.py --folder llama-250m                    # 254 million random parameters; 3 GB of disk
    python tools/bench/models.py --folder llama-250m --recipes int4,fp6,my-recipe.yaml --ggml build --json models.json

The peers are built from the same checkpoint with the same shapes: onnxruntime-genai by its own model builder (int4,
blocks of 128, accuracy level 4), llama.cpp by llama-quantize; `tools/bench/ops.py --help` says how to build it. That of
OpenVINO GenAI is made by optimum-intel, which needs an older transformers: `--optimum` names the Python of its
environment (`pip install optimum-intel nncf openvino`); openvino-genai itself is installed beside graphopt. A model
that exists in the folder is not built again. Each round opens one engine after the other, so that no idle engine's
threads spin beside the one that is timed.
"""

from __future__ import annotations

import gc
import json
import random
import shutil
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from tools.bench.make_llama import make_llama
from tools.bench.parts.machine import OtherLoad, describe, quiet
from tools.bench.parts.models import Model, Speeds, Work, models
from tools.bench.parts.options import Ggml, JsonFile
from tools.bench.parts.unavailable import UnavailableError


def main(
    folder: Annotated[Path, typer.Option(help="where models are built, and stay")],
    recipes: Annotated[str, typer.Option(help="presets or YAML files")] = "int4,fp6",
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    threads: Annotated[int, typer.Option(min=1, help="of each engine")] = 2,
    context: Annotated[int, typer.Option(help="tokens before the first that is decoded")] = 128,
    new_tokens: Annotated[int, typer.Option("--decoded", help="tokens to decode")] = 64,
    prompt: Annotated[int, typer.Option(help="tokens to prefill")] = 512,
    layers: int = 16,
    hidden: int = 1024,
    inner: int = 2816,
    ggml: Ggml = None,
    optimum: Annotated[
        Path | None, typer.Option(envvar="GRAPHOPT_BENCH_OPTIMUM", help="a Python with optimum-intel and nncf")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Build missing models, time every engine in every round in a new random order, print medians and ratios."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_llama(checkpoint, layers=layers, hidden=hidden, inner=inner)
    vocabulary = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    work = Work(threads, context, new_tokens, prompt, vocabulary, ggml, optimum)
    absent: dict[str, str] = {}
    ready = [model for model in models(recipes.split(","), work) if _build_missing(model, checkpoint, absent)]
    console.print(f"{describe()}; {threads} threads, {rounds} rounds", highlight=False)
    load = OtherLoad()
    speeds = _measure(ready, folder, work, rounds, absent)
    rows = [
        {
            "case": {"context": context, "decoded": new_tokens, "prompt": prompt},
            "engine": name,
            "bytes": _size(folder / name),
            "decode": statistics.median(speed.decode for speed in engine_speeds),
            "prefill": statistics.median(speed.prefill for speed in engine_speeds),
            "rounds": [{"decode": speed.decode, "prefill": speed.prefill} for speed in engine_speeds],
        }
        for name, engine_speeds in speeds.items()
    ]
    comparisons = _compare(speeds)
    share = load.share()
    console.print(_table(rows))
    console.print(quiet(share), highlight=False)
    for comparison in comparisons:
        decode, prefill = f"{comparison['decode']:.2f}", f"{comparison['prefill']:.2f}"
        ratios = f"decodes {decode} and prefills {prefill} times as fast as {comparison['peer']}"
        console.print(f"{comparison['engine']} {ratios}", highlight=False)
    for name, reason in absent.items():
        console.print(f"absent: {name}: {reason}", highlight=False, markup=False)
    if json_file is not None:
        report = {"machine": describe(), "threads": threads, "others": share, "absent": absent}
        lists = {"rows": rows, "comparisons": comparisons}
        json_file.write_text(json.dumps({**report, **lists}, indent=2) + "\n")


def _build_missing(model: Model, checkpoint: Path, absent: dict[str, str]) -> bool:
    """Build the engine's model unless it exists; return whether it does, and note in ``absent`` why not."""
    target = checkpoint.with_name(model.name)
    if target.exists():
        return True
    build_path = checkpoint.with_name(f"{model.name}.unfinished")
    _remove(build_path)
    try:
        model.build(checkpoint, build_path)
    except UnavailableError as error:
        absent[model.name] = str(error)
    except Exception as error:  # a recipe may need what this graphopt lacks; the others are still run
        absent[model.name] = f"{type(error).__name__}: {error}"
    else:
        build_path.rename(target)
        return True
    _remove(build_path)
    return False


def _measure(
    ready: list[Model], folder: Path, work: Work, rounds: int, absent: dict[str, str]
) -> dict[str, list[Speeds]]:
    """Return the speeds of every round by engine; one that cannot run is noted in ``absent`` and left out."""
    speeds: dict[str, list[Speeds]] = {model.name: [] for model in ready}
    generator = random.Random(0)
    for _ in range(rounds):
        for model in generator.sample(ready, len(ready)):
            if model.name not in speeds:
                continue
            try:
                speeds[model.name].append(model.speeds(folder / model.name, work))
            except UnavailableError as error:
                absent[model.name] = str(error)
                del speeds[model.name]
            gc.collect()
    return speeds


def _compare(speeds: dict[str, list[Speeds]]) -> list[dict[str, Any]]:
    """Return how many times as fast as each peer each engine of graphopt is: medians over rounds of ratios."""
    return [
        {
            "engine": engine,
            "peer": peer,
            "decode": statistics.median(a.decode / b.decode for a, b in zip(own_speeds, peer_speeds, strict=True)),
            "prefill": statistics.median(a.prefill / b.prefill for a, b in zip(own_speeds, peer_speeds, strict=True)),
        }
        for engine, own_speeds in speeds.items()
        for peer, peer_speeds in speeds.items()
        if engine.startswith("graphopt") and not peer.startswith("graphopt")
    ]


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(Column("engine", no_wrap=True))
    for name in ("decode, tokens/s", "prefill, tokens/s", "MB"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row["engine"], f"{row['decode']:.0f}", f"{row['prefill']:.0f}", f"{row['bytes'] / 1e6:.0f}")
    return table


def _size(path: Path) -> int:
    return (
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else path.stat().st_size
    )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    typer.run(main)
