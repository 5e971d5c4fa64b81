"""Measure drafts beside llama.cpp's: tokens per second with and without, of the same weights, in interleaved rounds.

    graphopt export model.Q4_1.gguf -o float32
    graphopt optimize float32 -r keep.yaml --target ort-cpu -o kept       # as docs/real-models.md has it
    python tools/bench/speculation.py kept --gguf model.Q4_1.gguf --ggml build

llama.cpp's drafts are those of n-grams, which need no second model: `llama-server --spec-type`. With `--draft` and
`--draft-gguf` a smaller model drafts too, the same for both:

    python tools/bench/make_gguf.py stdlib_lm_draft draft.gguf
    python tools/bench/speculation.py made --gguf model.gguf --draft made-draft --draft-gguf draft.gguf --ggml build

Each round starts one engine after the other, in a new random order. Only tokens after the prompt are timed;
llama-server reports that time itself. Both write their own text, greedily: `completing` modules that were held out of
training, and `own editing`, where the prompt holds a file and the beginning of the same file with a name changed.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import graphopt
from graphopt.inference.decoding.proposers.registry import open_speculation
from graphopt.inference.session import Session

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from tools.bench.parts.drafting import Task, tasks, write_text
from tools.bench.parts.machine import OtherLoad, describe, quiet
from tools.bench.parts.serving import free_port, running
from tools.bench.parts.unavailable import UnavailableError

KINDS = ("completing", "own editing")
DRAFTERS = ("", "lookup", "auto")
SPEC_TYPES = ("none", "ngram-simple", "ngram-map-k", "ngram-cache", "ngram-mod")

Speeds = dict[str, float]
"""Tokens per second by kind of task."""


def graphopt_speeds(folder: Path, drafter: str, task_list: list[Task], tokens: int, threads: int) -> Speeds:
    """Return graphopt's speed with a drafter, or with none for ``""``, after a short text to warm up."""
    session = graphopt.load(folder, threads=threads)
    speculation = open_speculation(session, drafter, "auto") if drafter else None
    write_text(session, task_list[0], 8, speculation=speculation)

    def time_task(task: Task) -> tuple[int, float]:
        text, seconds = write_text(session, task, tokens, speculation=speculation)
        return len(text) - 1, seconds

    return _by_kind(task_list, time_task)


def llama_speeds(
    file: Path, build: Path, drafter: str, task_list: list[Task], tokens: int, threads: int, draft: Path | None = None
) -> Speeds:
    """Return the speed of llama-server with ``--spec-type``, and the model ``draft`` where that is of a model.

    Raises:
        UnavailableError: the server is not there or does not start.
    """
    server, port = build.resolve() / "bin" / "llama-server", free_port()
    if not server.is_file():
        raise UnavailableError(f"{server} is not there: cmake --build {build} --target llama-server")
    room = max(len(task.prompt) for task in task_list) + tokens + 64
    command = [str(server), "-m", str(file.resolve()), "--port", str(port), "--host", "127.0.0.1", "-np", "1"]
    command += ["-c", str(room), "--spec-type", drafter, *(["-t", str(threads)] if threads else [])]
    command += ["--spec-draft-model", str(draft.resolve())] if draft else []

    def time_task(task: Task) -> tuple[int, float]:
        body = {"prompt": task.prompt, "n_predict": tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            timings = json.load(answer)["timings"]
        return int(timings["predicted_n"]), timings["predicted_ms"] / 1000

    with tempfile.TemporaryDirectory() as logs, running(command, port, "/health", Path(logs) / "log"):
        time_task(task_list[0])
        return _by_kind(task_list, time_task)


def _by_kind(task_list: list[Task], time_task: Callable[[Task], tuple[int, float]]) -> Speeds:
    speeds = {}
    for kind in KINDS:
        results = [time_task(task) for task in task_list if task.kind == kind]
        speeds[kind] = sum(count for count, _ in results) / sum(seconds for _, seconds in results)
    return speeds


def _tasks(session: Session, window: int, modules: int) -> list[Task]:
    return [task for task in tasks(session, window, modules) if task.kind in KINDS]


def main(
    folder: Annotated[Path, typer.Argument(help="an artifact with a tokenizer")],
    gguf: Annotated[Path | None, typer.Option(help="the same model for llama.cpp")] = None,
    ggml: Annotated[Path | None, typer.Option(envvar="GRAPHOPT_BENCH_GGML", help="llama.cpp's build folder")] = None,
    draft: Annotated[Path | None, typer.Option(help="a smaller artifact that drafts")] = None,
    draft_gguf: Annotated[Path | None, typer.Option(help="the same model for llama.cpp")] = None,
    modules: Annotated[int, typer.Option(min=1)] = 3,
    window: Annotated[int, typer.Option(help="tokens of a file")] = 350,
    tokens: Annotated[int, typer.Option(min=2, help="tokens of each text")] = 200,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: Annotated[int, typer.Option(help="0 lets the engine choose")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the medians here too")] = None,
) -> None:
    """Print medians, and each drafter's speed against its own engine without drafts."""
    task_list = _tasks(graphopt.load(folder, threads=threads), window, modules)
    engines: dict[tuple[str, str], Callable[[], Speeds]] = {
        ("graphopt", drafter or "none"): partial(graphopt_speeds, folder, drafter, task_list, tokens, threads)
        for drafter in DRAFTERS
    }
    if draft is not None:
        engines["graphopt", "a model"] = partial(graphopt_speeds, folder, str(draft), task_list, tokens, threads)
    if gguf is not None and ggml is not None:
        for drafter in SPEC_TYPES:
            run = partial(llama_speeds, gguf, ggml, drafter, task_list, tokens, threads)
            engines["llama.cpp", drafter] = run
        if draft_gguf is not None:
            run = partial(llama_speeds, gguf, ggml, "draft-simple", task_list, tokens, threads, draft_gguf)
            engines["llama.cpp", "draft-simple"] = run
    samples: dict[tuple[str, str], list[Speeds]] = {engine: [] for engine in engines}
    console, load = Console(), OtherLoad()
    for _ in range(rounds):
        for engine in random.sample(list(engines), len(engines)):
            try:
                samples[engine].append(engines[engine]())
            except UnavailableError as error:
                console.print(f"absent: {' '.join(engine)}: {error}", markup=False)
    medians = {
        engine: {kind: statistics.median(speed[kind] for speed in speeds) for kind in KINDS}
        for engine, speeds in samples.items()
        if speeds
    }
    ratios = [f"{kind}, times none" for kind in KINDS]
    table = Table("engine", "drafts", *(f"{kind}, tokens/s" for kind in KINDS), *ratios)
    for engine, speeds in medians.items():
        plain = medians[engine[0], "none"]
        cells = [f"{speeds[kind]:.1f}" for kind in KINDS] + [f"{speeds[kind] / plain[kind]:.2f}" for kind in KINDS]
        table.add_row(*engine, *cells)
    console.print(describe(), table, quiet(load.share()), sep="\n")
    if json_file is not None:
        rows = [{"engine": engine, "drafts": drafts, **speeds} for (engine, drafts), speeds in medians.items()]
        json_file.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
