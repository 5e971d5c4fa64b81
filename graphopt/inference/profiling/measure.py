"""A model profiled: prompts and single tokens apart, its time by nodes, and the bandwidth of the memory meanwhile."""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from pydantic import BaseModel, ConfigDict

from graphopt.errors import InputError
from graphopt.graph.onnx_file import load as load_file
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.profiling.events import Event, origins, read_events
from graphopt.inference.session import Opened, open_folder, session_from
from graphopt.ort.session import open_session
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PROMPT, TOKENS, REPEATS = 128, 32, 5
"""Tokens of a prompt, single tokens behind it, and how often the prompt is read."""

_PROBED = 1 << 27
_EXTERNAL = {
    "session.optimized_model_external_initializers_file_name": "optimized.data",
    "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
}


class Run(BaseModel):
    """What one kind of run takes.

    Attributes:
        tokens: new tokens of one run.
        runs: how many were profiled.
        seconds: of one run without a profile, the median.
        profiled: of one run while it is profiled, the median.
        nodes: of one run, the median, by the name of the node in the file, scaled to the time without a profile.
        kernels: the operators that onnxruntime ran for each node.
        between: of one run, what no kernel took: the executor itself.
    """

    model_config = ConfigDict(extra="forbid")

    tokens: int
    runs: int
    seconds: float
    profiled: float
    nodes: dict[str, float]
    kernels: dict[str, list[str]]
    between: float


class Profile(BaseModel):
    """Where the time of a model goes.

    Attributes:
        model: the folder or file.
        threads: of onnxruntime, 0 where it chose.
        bandwidth: bytes per second that this machine reads from memory, probed between the runs.
        prompt: reading a prompt.
        token: computing one more token; ``None`` for a model that makes no text.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    threads: int
    bandwidth: float
    prompt: Run
    token: Run | None = None


def profile(
    path: Path,
    *,
    prompt: int = PROMPT,
    tokens: int = TOKENS,
    repeats: int = REPEATS,
    threads: int = 0,
    perfetto: Path | None = None,
    on_stage: Progress = silent,
) -> Profile:
    """Run a causal language model with onnxruntime's profiler, and tell its time by the nodes of its file.

    Args:
        path: an artifact or an ``.onnx`` file.
        prompt: tokens of a prompt.
        tokens: single tokens behind it.
        repeats: how often the prompt is read.
        threads: threads that one operator may use; 0 lets onnxruntime choose.
        perfetto: where to write the trace of onnxruntime, which https://ui.perfetto.dev reads; ``None`` for nowhere.
        on_stage: called when a stage begins.

    Raises:
        InputError: it is no causal language model, or cannot be run; or its prompt is too long.
    """
    opened = open_folder(path, threads=threads)
    limit = session_from(opened).max_positions
    if limit is not None and prompt + tokens > limit:
        raise InputError(
            f"{prompt} tokens and {tokens} more do not fit {limit} positions", file=path, remedy="ask for fewer tokens"
        )
    ids = np.random.default_rng(0).integers(0, session_from(opened).interface.vocabulary or 1, (1, prompt + tokens))

    def run(given: Opened) -> tuple[list[float], list[float]]:
        session, feeds, steps = session_from(given), [], []
        for _ in range(repeats + 1):
            decoder = Decoder(session, 1, room=prompt + tokens)
            feeds.append(_timed(lambda decoder=decoder: list(decoder.feed(ids[:, :prompt]))))  # type: ignore[misc]
        for at in range(prompt, prompt + tokens):
            steps.append(_timed(lambda at=at: decoder.step(ids[:, at : at + 1])))  # type: ignore[misc]
        return feeds[1:], steps

    on_stage("running it without a profile")
    plain = run(opened)
    bandwidth = probe()
    on_stage("running it with a profile")
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        entries, optimized = {**opened.manifest.session, **_EXTERNAL}, Path(folder) / "optimized.onnx"
        session = open_session(
            opened.file, entries=entries, threads=threads, optimized_to=optimized, profile=Path(folder) / "profile"
        )
        run(dataclasses.replace(opened, inference=session))
        written = Path(session.end_profiling())
        kernels, seconds = read_events(written)
        names = origins(load_file(opened.file).graph, ir.load(optimized).graph)
        if perfetto is not None:
            perfetto.write_bytes(written.read_bytes())
    # The first prompt warms up; every prompt is read in equally many pieces.
    first = (len(kernels) - tokens) // (repeats + 1)
    parts = slice(first, len(kernels) - tokens), slice(len(kernels) - tokens, None)
    made = [
        _run(kernels[part], seconds[part], count, new, statistics.median(times), names)
        for part, count, new, times in zip(parts, (repeats, tokens), (prompt, 1), plain, strict=True)
    ]
    bandwidth = max(bandwidth, probe())
    return Profile(model=str(path), threads=threads, bandwidth=bandwidth, prompt=made[0], token=made[1])


def _run(
    kernels: list[list[Event]], micros: list[int], runs: int, tokens: int, seconds: float, names: Mapping[str, str]
) -> Run:
    """Put the events of equal runs together: medians, since other programs disturb some of them."""
    pieces = max(1, len(micros) // runs)  # a long prompt is read in several
    totals = [sum(micros[begin : begin + pieces]) for begin in range(0, len(micros), pieces)]
    taken: dict[str, list[int]] = {}
    kinds: dict[str, dict[str, None]] = {}
    for number, events in enumerate(kernels):
        for event in events:
            name = names.get(event.node, event.node)
            taken.setdefault(name, [0] * len(totals))[number // pieces] += event.duration
            kinds.setdefault(name, {})[event.operator] = None
    found = {name: statistics.median(each) for name, each in taken.items()}
    rest = [max(0, total - sum(each[n] for each in taken.values())) for n, total in enumerate(totals)]
    between = statistics.median(rest)
    # A run that was disturbed nowhere; what is left of a disturbance is in the scale.
    scale = seconds / max(1e-9, sum(found.values()) + between)
    found = {name: each * scale for name, each in found.items()}
    between *= scale
    profiled = statistics.median(totals) / 1e6
    return Run(
        tokens=tokens,
        runs=runs,
        seconds=seconds,
        profiled=profiled,
        nodes=found,
        kernels={name: list(operators) for name, operators in kinds.items()},
        between=between,
    )


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def probe() -> float:
    """Return how many bytes per second all processors together read from memory: the best of three sums."""
    workers = os.cpu_count() or 1
    parts = [np.ones(_PROBED // workers // 8) for _ in range(workers)]
    with ThreadPoolExecutor(workers) as threads:
        best = min(_timed(lambda: list(threads.map(np.sum, parts))) for _ in range(3))
    return sum(part.nbytes for part in parts) / best
