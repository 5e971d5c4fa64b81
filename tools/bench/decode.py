"""Measure decoding, or reading of prompts, of artifacts side by side: tokens per second, interleaved, medians, ratios.

    python tools/bench/decode.py graphopt-demo/float32 graphopt-demo/rotate-int4
    python tools/bench/decode.py small medium --read 512                               # how fast prompts are read
    python tools/bench/decode.py kept --gguf model.Q4_1.gguf --ggml llama.cpp/build    # llama-bench beside them

Each round opens one artifact after the other, so that no idle session's threads spin beside the one that is timed.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import graphopt
from graphopt.inference.decoding.decoder import Decoder


def tokens_per_second(folder: Path, prompt: str, tokens: int, threads: int) -> float:
    """Return the speed of greedy decoding of ``tokens`` tokens, after a run to warm up."""
    session = graphopt.load(folder, threads=threads)
    graphopt.generate(session, prompt, max_new_tokens=8)
    begin = time.perf_counter()
    new_tokens = graphopt.generate(session, prompt, max_new_tokens=tokens)[0].tokens
    return len(new_tokens) / (time.perf_counter() - begin)


def prompt_tokens_per_second(folder: Path, tokens: int, threads: int) -> float:
    """Return the speed of reading a prompt of ``tokens`` tokens, all logits computed, after a run to warm up."""
    session = graphopt.load(folder, threads=threads)
    prompt = np.random.default_rng(0).integers(0, session.interface.vocabulary or 1, (1, tokens))
    for _ in Decoder(session, 1, room=tokens).feed(prompt):
        pass
    decoder, begin = Decoder(session, 1, room=tokens), time.perf_counter()
    for _ in decoder.feed(prompt):
        pass
    return tokens / (time.perf_counter() - begin)


def llama_bench(file: Path, build: Path, tokens: int, threads: int, prompt_tokens: int) -> float:
    """Return tokens per second of a GGUF file by llama.cpp's own benchmark: decoding, or reading ``prompt_tokens``."""
    command = [
        str(build / "bin" / "llama-bench"),
        "-m",
        str(file),
        "-p",
        str(prompt_tokens),
        "-n",
        "0" if prompt_tokens else str(tokens),
        "-r",
        "1",
        "-o",
        "json",
    ]
    command += ["-t", str(threads)] if threads else []
    (result,) = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return float(result["avg_ts"])


def main(
    folders: Annotated[list[Path], typer.Argument(help="artifacts; ratios are to the first")],
    prompt: str = "def read_lines(path):",
    tokens: int = 128,
    prompt_tokens: Annotated[
        int, typer.Option("--read", min=0, help="time the prefill of a prompt of this length instead of decoding")
    ] = 0,
    rounds: int = 7,
    threads: Annotated[int, typer.Option(help="0 lets the engine choose")] = 0,
    gguf: Annotated[Path | None, typer.Option(help="a file for llama.cpp's llama-bench, in every round too")] = None,
    ggml: Annotated[Path | None, typer.Option(envvar="GRAPHOPT_BENCH_GGML", help="llama.cpp's build folder")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here too")] = None,
) -> None:
    """Time each artifact in every round, and print medians, ranges and ratios."""
    if gguf is not None and (ggml is None or not (ggml / "bin" / "llama-bench").is_file()):
        raise typer.BadParameter("name llama.cpp's build folder, with bin/llama-bench in it: --ggml FOLDER")
    speeds: dict[Path, list[float]] = {folder: [] for folder in [*folders, *([] if gguf is None else [gguf])]}
    for _ in range(rounds):
        for folder in folders:
            speed = prompt_tokens_per_second(folder, prompt_tokens, threads) if prompt_tokens else None
            speeds[folder].append(speed or tokens_per_second(folder, prompt, tokens, threads))
        if gguf is not None and ggml is not None:
            speeds[gguf].append(llama_bench(gguf, ggml, tokens, threads, prompt_tokens))
    first = statistics.median(speeds[folders[0]])
    table = Table("artifact", "tokens/s", "lowest", "highest", "ratio")
    rows = []
    for folder, values in speeds.items():
        median = statistics.median(values)
        table.add_row(folder.name, f"{median:.0f}", f"{min(values):.0f}", f"{max(values):.0f}", f"{median / first:.2f}")
        rows.append({"artifact": str(folder), "tokens_per_second": values, "median": median, "ratio": median / first})
    Console().print(table)
    if json_file is not None:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
        json_file.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
