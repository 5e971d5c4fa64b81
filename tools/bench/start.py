"""Measure the time that a model takes to start: import, session, first token, beside reading its files.

    python tools/bench/start.py int4                               # one artifact, or several
    python tools/bench/start.py int4 --threads 2 --rounds 9 --json start.json

Each start is a process of its own, in turn with the others. *Cold* asks the system to forget the files first, so that
they come from the disk; *warm* reads them once before. *read* is a process that reads all files of the model in pieces
of 1 MB, in the same state of the cache.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

# Times of one start, in a process that has imported nothing yet.
_START = """
import json, sys, time
began = time.perf_counter()
import graphopt
graphopt.load, graphopt.generate
import onnxruntime
imported = time.perf_counter()
session = graphopt.load(sys.argv[1], threads=int(sys.argv[2]))
opened = time.perf_counter()
graphopt.generate(session, [[1, 2, 3, 4]], max_new_tokens=1)
done = time.perf_counter()
print(json.dumps({"import": imported - began, "session": opened - imported, "first token": done - opened}))
"""

_READ_PROGRAM = """
import json, sys, time
piece = memoryview(bytearray(1 << 20))
began = time.perf_counter()
for name in sys.argv[1:]:
    with open(name, "rb", buffering=0) as file:
        while file.readinto(piece):
            pass
print(json.dumps({"read": time.perf_counter() - began}))
"""

STAGES = ("read", "import", "session", "first token")


def model_files(folder: Path) -> list[Path]:
    """Return the files that hold the graph and the weights."""
    return sorted(folder.glob("model.onnx*"))


def prepare(files: list[Path], *, cold: bool) -> None:
    """Drop files from the system's cache, or read them into it."""
    for file in files:
        with file.open("rb", buffering=0) as stream:
            if cold:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while stream.read(1 << 24):
                    pass


def run_program(program: str, *arguments: object) -> dict[str, float]:
    """Run a program in a process of its own and return the seconds that it prints."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    seconds: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return seconds


def main(
    folders: Annotated[list[Path], typer.Argument(help="artifacts")],
    rounds: int = 5,
    threads: Annotated[int, typer.Option(help="0 lets onnxruntime choose")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here too")] = None,
) -> None:
    """Time starts of each artifact in every round, cold and warm, and print medians in milliseconds."""
    samples: dict[tuple[Path, bool], list[dict[str, float]]] = {}
    for _ in range(rounds):
        for folder in folders:
            files = model_files(folder)
            for cold in (True, False):
                prepare(files, cold=cold)
                times = run_program(_READ_PROGRAM, *files)
                prepare(files, cold=cold)
                samples.setdefault((folder, cold), []).append(times | run_program(_START, folder, threads))
    table = Table("artifact", "MB", "cache", *(f"{stage}, ms" for stage in STAGES), "session / read")
    rows = []
    for (folder, cold), starts in samples.items():
        size = sum(file.stat().st_size for file in model_files(folder))
        medians = {stage: statistics.median(start[stage] for start in starts) for stage in STAGES}
        ratio = statistics.median(start["session"] / start["read"] for start in starts)
        state = "cold" if cold else "warm"
        cells = [f"{1e3 * medians[stage]:.0f}" for stage in STAGES]
        table.add_row(folder.name, f"{size / 1e6:.0f}", state, *cells, f"{ratio:.2f}")
        rows.append({"artifact": str(folder), "bytes": size, "cache": state, **medians, "session_of_read": ratio})
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"cores": os.cpu_count(), "rounds": rounds, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
