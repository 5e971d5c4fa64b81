"""Serving: tokens per second and waiting times at several numbers of clients, `graphopt serve` beside llama-server.

    python tools/bench/serve.py --folder llama-250m                        # 254 million random parameters; 3 GB of disk
    python tools/bench/serve.py --folder llama-250m --ggml llama.cpp/build --json serve.json

Both serve the same checkpoint: graphopt as `--recipe` and the step `serve` make it, llama-server (continuous batching,
a slot for each client) as Q4_0; `cmake --build BUILD --target llama-server` builds it. Prompts are random tokens,
no two alike; replies have a fixed length. Each round starts one server after the other, in a new random order.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from tools.bench.make_llama import make_llama
from tools.bench.parts.gguf_file import write_gguf
from tools.bench.parts.machine import OtherLoad, describe, quiet
from tools.bench.parts.options import Ggml, JsonFile
from tools.bench.parts.serving import Reply, Server, free_port, running, send_all
from tools.bench.parts.unavailable import UnavailableError

GRAPHOPT, LLAMA = "graphopt serve", "llama-server"


@dataclass(frozen=True)
class Work:
    """What each server does.

    Attributes:
        folder: where models are built, and stay.
        recipe: of graphopt's graph.
        llama_cpp: a build folder of llama.cpp, if there is one.
        threads: of each server.
        prompt: tokens of a prompt.
        reply: tokens of a reply.
        max_clients: requests at once, at most.
    """

    folder: Path
    recipe: str
    llama_cpp: Path | None
    threads: int
    prompt: int
    reply: int
    max_clients: int


def main(
    folder: Annotated[Path, typer.Option(help="where models are built, and stay")],
    recipe: Annotated[str, typer.Option(help="a preset or YAML file")] = "int4-rtn",
    clients: Annotated[str, typer.Option(help="requests at once, one number after the other")] = "1,4,16",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: Annotated[int, typer.Option(min=1, help="of each server")] = 2,
    prompt: Annotated[int, typer.Option(help="tokens of a prompt")] = 512,
    reply: Annotated[int, typer.Option(help="tokens of a reply")] = 128,
    layers: int = 16,
    hidden: int = 1024,
    inner: int = 2816,
    ggml: Ggml = None,
    json_file: JsonFile = None,
) -> None:
    """Build missing models, measure every server in every round, print medians and ratios."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    counts = [int(count) for count in clients.split(",")]
    work = Work(folder, recipe, ggml, threads, prompt, reply, max(counts))
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_llama(checkpoint, layers=layers, hidden=hidden, inner=inner)
        _widen_tokenizer(checkpoint)
    servers = {GRAPHOPT: _graphopt, LLAMA: _llama_server}
    absent: dict[str, str] = {}
    samples: dict[tuple[str, int], list[dict[str, float]]] = {}
    console.print(f"{describe()}; {threads} threads, {rounds} rounds", highlight=False)
    load, generator = OtherLoad(), random.Random(0)
    vocabulary = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    for number in range(rounds):
        numbers = np.random.default_rng(number)
        prompts = {count: numbers.integers(0, vocabulary, (max(count, 2), prompt)).tolist() for count in counts}
        for name in generator.sample(sorted(servers), len(servers)):
            try:
                with servers[name](work) as server:
                    # the first request warms the server up
                    asyncio.run(send_all(server, [numbers.integers(0, vocabulary, 32).tolist()], 1))
                    for count in counts:
                        replies, seconds = asyncio.run(send_all(server, prompts[count], count))
                        figures = _figures(replies, seconds, reply)
                        samples.setdefault((name, count), []).append(figures)
                        line = (
                            f"round {number + 1}: {name}, {count} at once: {figures['tokens_per_second']:.1f} tokens/s"
                        )
                        console.print(f"{line}, first token after {figures['first_p50']:.2f} s", highlight=False)
            except UnavailableError as error:
                absent[name] = str(error)
                del servers[name]
    share = load.share()
    rows = [
        {"server": name, "clients": count, **_medians(round_figures)}
        for (name, count), round_figures in samples.items()
    ]
    console.print(_table(rows))
    console.print(quiet(share), highlight=False)
    ratios = _ratios(samples, counts)
    for count, ratio in ratios.items():
        console.print(f"{count} at once: {GRAPHOPT} makes {ratio:.2f} times the tokens of {LLAMA}", highlight=False)
    for name, reason in absent.items():
        console.print(f"absent: {name}: {reason}", highlight=False, markup=False)
    if json_file is not None:
        report = {"machine": describe(), "threads": threads, "others": share, "absent": absent, "ratios": ratios}
        rounds_of = [
            {"server": name, "clients": count, "rounds": round_figures}
            for (name, count), round_figures in samples.items()
        ]
        json_file.write_text(json.dumps({**report, "rows": rows, "measured": rounds_of}, indent=2) + "\n")


def _figures(replies: list[Reply], seconds: float, reply_tokens: int) -> dict[str, float]:
    if any(reply.tokens != reply_tokens for reply in replies):
        raise UnavailableError(
            f"replies of {sorted({reply.tokens for reply in replies})} tokens, and not {reply_tokens}"
        )
    first = [reply.arrivals[0] for reply in replies]
    gaps = [
        later - earlier for reply in replies for earlier, later in zip(reply.arrivals, reply.arrivals[1:], strict=False)
    ]
    return {
        "tokens_per_second": sum(reply.tokens for reply in replies) / seconds,
        "first_p50": float(np.percentile(first, 50)),
        "first_p99": float(np.percentile(first, 99)),
        "between_p50": float(np.percentile(gaps, 50)),
        "between_p99": float(np.percentile(gaps, 99)),
        "parts_per_token": sum(len(reply.arrivals) for reply in replies) / sum(reply.tokens for reply in replies),
    }


def _medians(round_figures: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(figures[name] for figures in round_figures) for name in round_figures[0]}


def _ratios(samples: dict[tuple[str, int], list[dict[str, float]]], counts: list[int]) -> dict[int, float]:
    """Return how many times the tokens per second of llama-server, the median over rounds."""
    name = "tokens_per_second"
    return {
        count: statistics.median(
            a[name] / b[name] for a, b in zip(samples[GRAPHOPT, count], samples[LLAMA, count], strict=False)
        )
        for count in counts
        if (GRAPHOPT, count) in samples and (LLAMA, count) in samples
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("server", "clients")
    for name in ("tokens/s", "first token p50", "p99, s", "between tokens p50", "p99, ms"):
        table.add_column(name, justify="right")
    for row in sorted(rows, key=lambda row: (row["clients"], row["server"])):
        first, gaps = ([row[f"{name}_{part}"] for part in ("p50", "p99")] for name in ("first", "between"))
        figures = [f"{row['tokens_per_second']:.1f}", *(f"{value:.2f}" for value in first)]
        table.add_row(row["server"], str(row["clients"]), *figures, *(f"{1000 * value:.1f}" for value in gaps))
    return table


@contextmanager
def _graphopt(work: Work) -> Iterator[Server]:
    # the pool is a part of the artifact
    pool = f"{work.max_clients}x{work.prompt + work.reply}"
    folder = work.folder.resolve() / f"served-{Path(work.recipe).stem}-{pool}"
    if not folder.exists():
        _optimize(work, folder)
    port = free_port()
    command = [sys.executable, "-c", "from graphopt.cli import main; main()", "serve", str(folder), "--name", "bench"]
    command += ["--port", str(port), "--threads", str(work.threads)]
    usage = {"stream_options": {"include_usage": True}, "ignore_eos": True}
    body = {"model": "bench", "max_tokens": work.reply, "temperature": 0, "stream": True, **usage}
    with running(command, port, "/v1/models", work.folder / "graphopt-serve.log"):
        yield Server(port, "/v1/completions", body, ("usage", "completion_tokens"))


def _optimize(work: Work, target: Path) -> None:
    from graphopt.compile.pipeline import chosen_recipe, optimize
    from graphopt.models.export import export
    from graphopt.passes.recipe import load_recipe

    float_artifact = work.folder / "float32"
    if not float_artifact.exists():
        export(str(work.folder / "checkpoint"), float_artifact)
    # room for all requests at once, and as much for prefixes that are kept
    memory = 2 * work.max_clients * (work.prompt + work.reply) * _bytes_per_token(float_artifact)
    recipe = load_recipe(work.recipe, ["serve"], [f"serve.memory={memory}"])
    optimize(float_artifact, chosen_recipe(recipe, "ort-cpu", False, False), target, run=False)


def _bytes_per_token(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    size = int(config["hidden_size"]) // int(config["num_attention_heads"])
    return 2 * int(config["num_hidden_layers"]) * int(config["num_key_value_heads"]) * size * 4


@contextmanager
def _llama_server(work: Work) -> Iterator[Server]:
    if work.llama_cpp is None:
        raise UnavailableError("no build of llama.cpp is named: --ggml FOLDER, or GRAPHOPT_BENCH_GGML")
    server, quantize = (work.llama_cpp.resolve() / "bin" / name for name in ("llama-server", "llama-quantize"))
    for tool in (server, quantize):
        if not tool.is_file():
            raise UnavailableError(f"{tool} is not there: cmake --build {work.llama_cpp} --target {tool.name}")
    file, source = (work.folder.resolve() / f"served.{kind}.gguf" for kind in ("Q4_0", "float16"))
    if not file.exists():
        write_gguf(work.folder / "checkpoint", source, tokenizer=True)
        subprocess.run([str(quantize), str(source), str(file), "Q4_0"], check=True, capture_output=True)
    port = free_port()
    slots = work.max_clients * (work.prompt + work.reply + 8)
    command = [str(server), "-m", str(file), "--port", str(port), "--host", "127.0.0.1", "-t", str(work.threads)]
    command += ["-c", str(slots), "-np", str(work.max_clients), "-cb"]
    body = {"n_predict": work.reply, "ignore_eos": True, "temperature": 0, "stream": True, "cache_prompt": False}
    with running(command, port, "/health", work.folder / "llama-server.log"):
        yield Server(port, "/completion", body, ("tokens_predicted",))


def _widen_tokenizer(checkpoint: Path) -> None:
    """Add tokens until there are as many as the model has: every token that a random model samples must have a text."""
    file = checkpoint / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary, size = tokenizer["model"]["vocab"], json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    used_ids = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary |= {f"Ġword{number}": number for number in range(size) if number not in used_ids}
    file.write_text(json.dumps(tokenizer))


if __name__ == "__main__":
    typer.run(main)
