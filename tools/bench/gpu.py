"""Check and time graphopt's CUDA operators where onnxruntime-gpu is not installed: a C interface, ctypes and torch.

    python tools/bench/gpu.py                       # everything; minutes
    python tools/bench/gpu.py --only 'Hadamard*' --json cuda.json
    python tools/bench/gpu.py --rows 1,8,16 --only '* t?,*, 8192 x 8192' --only '* int4, x in float16,*, 8192 x 8192'

Needs an NVIDIA GPU from sm_80 on, torch with CUDA, and graphopt installed where nvcc is found. Without these, it prints
what is missing and exits with 2.

How it is measured: the copies of a case's tensors fill twice the L2 cache, and calls go through them in turn. A CUDA
graph replays them, as starting a kernel from Python takes longer than some kernels run. graphopt and its rivals run in
the same rounds, in a new random order in each; a time is the median of the rounds by CUDA events, and a ratio is the
median of the rounds' own ratios. Bandwidth is compared with that of a large copy in the same run. Before a call is
timed, its output is filled with NaN, computed, and compared with float64: where it is farther off than rounding
explains, the case counts as wrong, is not timed, and the exit code is 1.
"""

from __future__ import annotations

import ctypes
import json
import random
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.runtime_ops import library_path
from tests.runtime_ops.cuda import interface, interpreted
from tools.bench.parts.cuda_case import Case

MODULES = ("cuda_hadamard", "cuda_kv_attention", "cuda_matmul")
"""Modules of tools/bench whose ``cases(library, torch, device)`` yields cases."""

COPY_BYTES = 1 << 30

LEAST_CALLS = 16
"""Of one replay, so that starting it is a small part of its time."""


def missing() -> str | None:
    """Return what this machine lacks, or ``None``."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than sm_80"
    if library_path("cuda") is None:
        return "the operators for GPUs are not built: install graphopt where nvcc is found"
    return None


def record_replay(torch: Any, call: Callable[[int], object], copies: int) -> tuple[Callable[[], None], int]:
    """Return the warm replay of a CUDA graph that goes through all copies, and how many calls are in it."""
    for index in range(copies):
        call(index)
    torch.cuda.synchronize()
    turns = -(-LEAST_CALLS // copies)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for index in range(copies):
                call(index)
    graph.replay()
    return graph.replay, turns * copies


def time_of(torch: Any, replay: Callable[[], None], calls: int) -> float:
    """Return the microseconds of one of the ``calls`` of a replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / calls


def copy_bandwidth(torch: Any) -> float:
    """Return bytes per second, read and written, of a copy that is larger than any cache."""
    a, b = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    replay, calls = record_replay(torch, lambda _: b.copy_(a), 1)
    times = [time_of(torch, replay, calls) for _ in range(10)]
    return 2 * COPY_BYTES / statistics.median(times) * 1e6


def measure(torch: Any, case: Case, rounds: int) -> dict[str, Any]:
    """Check a case on its first and last copy, and time it and its rivals."""
    errors = []
    for copy in (0, case.copies - 1):
        case.poison(copy)
        case.run(copy)
        torch.cuda.synchronize()
        errors.append(case.error(copy))
    worst = max(errors, key=lambda error: error if error == error else float("inf"))
    row: dict[str, Any] = {"case": case.name, "error": worst, "allowed": case.tolerance}
    if not worst <= case.tolerance:
        return row | {"wrong": True}
    calls: dict[str, Callable[[int], object]] = {"graphopt": case.run, **case.rivals}
    replays = {name: record_replay(torch, call, case.copies) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            times[name].append(time_of(torch, *replays[name]))
    row["us"] = {name: statistics.median(durations) for name, durations in times.items()}
    graphopt_times = times["graphopt"]
    row["times_as_fast_as"] = {
        name: statistics.median(
            rival_us / graphopt_us for graphopt_us, rival_us in zip(graphopt_times, times[name], strict=True)
        )
        for name in case.rivals
    }
    row["bandwidth"] = case.bytes_moved / row["us"]["graphopt"] * 1e6
    return row


def show(row: dict[str, Any], copy: float) -> str:
    """Return a row as a line of text."""
    if row.get("wrong"):
        return f"{row['case']}: WRONG, error {row['error']:.2e} where rounding explains {row['allowed']:.2e}"
    times = ", ".join(f"{name} {us:.1f} us" for name, us in row["us"].items())
    ratios = ", ".join(f"{ratio:.2f}x {name}" for name, ratio in row["times_as_fast_as"].items())
    share = f"{row['bandwidth'] / copy:.0%} of copy bandwidth"
    return f"{row['case']}: {times}; {ratios + '; ' if ratios else ''}{share}; error {row['error']:.1e}"


def is_wanted(name: str, patterns: Sequence[str], rows: Sequence[str]) -> bool:
    """Return whether a case matches one of the patterns and, where ``rows`` are given, has one of these numbers."""
    counts = re.search(r"\b(\d+) rows", name)
    return any(fnmatch(name, pattern) for pattern in patterns) and (not rows or bool(counts and counts[1] in rows))


def main(
    only: Annotated[list[str], typer.Option(help="cases whose name matches this pattern; may be repeated")] = ["*"],  # noqa: B006
    row_counts: Annotated[
        str, typer.Option("--rows", help="products of these numbers of rows alone, such as 1,8,16")
    ] = "",
    rounds: Annotated[int, typer.Option(min=3)] = 21,
    output: Annotated[Path | None, typer.Option("--json", help="a file for the figures")] = None,
) -> None:
    """Check and time the operators on the first GPU."""
    reason = missing()
    if reason is not None:
        print(f"nothing was run: {reason}", file=sys.stderr)
        raise typer.Exit(2)
    import torch

    path = library_path("cuda")
    assert path is not None
    library: ctypes.CDLL = interface.declare(interpreted.load(path), on_gpu=True)
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    copy = copy_bandwidth(torch)
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}; a copy moves {copy / 1e12:.2f} TB/s")
    counts = row_counts.split(",") if row_counts else []
    rows: list[dict[str, Any]] = []
    for module in MODULES:
        for case in import_module(f"tools.bench.parts.{module}").cases(
            library, torch, is_selected=lambda name: is_wanted(name, only, counts)
        ):
            rows.append(measure(torch, case, rounds))
            print(show(rows[-1], copy), flush=True)
    if output is not None:
        figures = {"device": device, "torch": torch.__version__, "copy_bandwidth": copy, "rows": rows}
        output.write_text(json.dumps(figures, indent=1) + "\n")
    if any(row.get("wrong") for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
