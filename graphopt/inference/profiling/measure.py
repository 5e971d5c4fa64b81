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
from graphopt.inference.session import OpenModel, open_folder, session_from
from graphopt.ort.session import open_session
from graphopt.ort.session import run as run_session
from graphopt.tasks import TASKS
from graphopt.tasks.encoder import vocabulary_of
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphopt.tasks import Task

PROMPT, TOKENS, REPEATS = 128, 32, 5
"""Tokens of a prompt, single tokens behind it, and how often the prompt is read."""

_PROBE_BYTES = 1 << 27
_EXTERNAL = {
    "session.optimized_model_external_initializers_file_name": "optimized.data",
    "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
}


class Run(BaseModel):
    """What one kind of run takes.

    Attributes:
        tokens: new tokens of one run; 0 of a graph that reads no text.
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
        prompt: reading a prompt; of a graph that reads no text one run.
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
    inputs: Path | None = None,
    on_stage: Progress = silent,
) -> Profile:
    """Run a model with onnxruntime's profiler, and tell its time by the nodes of its file.

    A model that generates text reads a prompt, then single tokens; an encoder reads a prompt. A graph of any kind runs
    its first sample.

    Args:
        path: an artifact or an ``.onnx`` file.
        prompt: tokens of a prompt.
        tokens: single tokens behind it.
        repeats: how often the prompt is read, or the sample run.
        threads: threads that one operator may use; 0 lets onnxruntime choose.
        perfetto: where to write the trace of onnxruntime, which https://ui.perfetto.dev reads; ``None`` for nowhere.
        inputs: of a graph that reads no text: a file or folder of inputs; ``None`` for random ones.
        on_stage: called when a stage begins.

    Raises:
        InputError: it cannot be run, or its prompt is too long.
    """
    model = open_folder(path, threads=threads)
    task = TASKS[model.manifest.task].with_inputs(inputs)
    if not task.generates:
        return _profile_calls(model, task, prompt, repeats, _Options(path, threads, perfetto, on_stage))
    limit = session_from(model).max_positions
    if limit is not None and prompt + tokens > limit:
        raise InputError(
            f"{prompt} tokens and {tokens} more do not fit {limit} positions", file=path, remedy="ask for fewer tokens"
        )
    ids = np.random.default_rng(0).integers(0, session_from(model).interface.vocabulary or 1, (1, prompt + tokens))

    def run(model: OpenModel) -> tuple[list[float], list[float]]:
        session, feeds, steps = session_from(model), [], []
        for _ in range(repeats + 1):
            decoder = Decoder(session, 1, room=prompt + tokens)
            feeds.append(_time(lambda decoder=decoder: list(decoder.feed(ids[:, :prompt]))))  # type: ignore[misc]
        for position in range(prompt, prompt + tokens):
            steps.append(_time(lambda position=position: decoder.step(ids[:, position : position + 1])))  # type: ignore[misc]
        return feeds[1:], steps

    measurement = _measure(model, run, _Options(path, threads, perfetto, on_stage))
    kernels, seconds = measurement.kernels, measurement.seconds
    # The first prompt warms up; every prompt is read in equally many pieces.
    first = (len(kernels) - tokens) // (repeats + 1)
    parts = slice(first, len(kernels) - tokens), slice(len(kernels) - tokens, None)
    runs = [
        _run(kernels[part], seconds[part], count, new, statistics.median(times), measurement.names)
        for part, count, new, times in zip(parts, (repeats, tokens), (prompt, 1), measurement.times, strict=True)
    ]
    bandwidth = max(measurement.bandwidth, probe())
    return Profile(model=str(path), threads=threads, bandwidth=bandwidth, prompt=runs[0], token=runs[1])


@dataclasses.dataclass(frozen=True)
class _Options:
    """What a profile is asked for, see :func:`profile`."""

    path: Path
    threads: int
    perfetto: Path | None
    on_stage: Progress


@dataclasses.dataclass(frozen=True)
class _Measurement:
    """Runs without a profile and with one.

    Attributes:
        times: seconds of runs without a profile, by their kind.
        bandwidth: of the memory, between them.
        kernels: of each run with a profile.
        seconds: of each, in microseconds.
        names: of nodes in the file, by those that onnxruntime runs.
    """

    times: tuple[list[float], list[float]]
    bandwidth: float
    kernels: list[list[Event]]
    seconds: list[int]
    names: Mapping[str, str]


def _measure(
    model: OpenModel, run: Callable[[OpenModel], tuple[list[float], list[float]]], options: _Options
) -> _Measurement:
    """Run a model without a profile, and then with one."""
    options.on_stage("running it without a profile")
    times, bandwidth = run(model), probe()
    options.on_stage("running it with a profile")
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        entries, graph_file = {**model.manifest.session, **_EXTERNAL}, Path(folder) / "optimized.onnx"
        session = open_session(
            model.file,
            entries=entries,
            threads=options.threads,
            optimized_to=graph_file,
            profile=Path(folder) / "profile",
        )
        run(dataclasses.replace(model, inference=session))
        trace = Path(session.end_profiling())
        kernels, seconds = read_events(trace)
        names = origins(load_file(model.file).graph, ir.load(graph_file).graph)
        if options.perfetto is not None:
            options.perfetto.write_bytes(trace.read_bytes())
    return _Measurement(times, bandwidth, kernels, seconds, names)


def _profile_calls(model: OpenModel, task: Task, prompt: int, repeats: int, options: _Options) -> Profile:
    """Profile a model that generates nothing: equal calls, of which the first warms up."""
    graph = load_file(model.file).graph
    if task.reads_text:
        feeds = task.text_feeds(graph, np.random.default_rng(0).integers(0, vocabulary_of(graph) or 2, (1, prompt)))
    else:
        feeds = task.first_sample(graph, model.inference)

    def run(target: OpenModel) -> tuple[list[float], list[float]]:
        session = target.inference
        return [_time(lambda: run_session(session, None, feeds)) for _ in range(repeats + 1)][1:], []

    try:
        measurement = _measure(model, run, options)
    except InputError:
        raise
    except Exception as error:  # whatever onnxruntime raises where an operator refuses what it is given
        raise InputError(f"onnxruntime cannot run the model: {error}", file=model.file) from error
    part = _run(
        measurement.kernels[1:],
        measurement.seconds[1:],
        repeats,
        prompt if task.reads_text else 0,
        statistics.median(measurement.times[0]),
        measurement.names,
    )
    bandwidth = max(measurement.bandwidth, probe())
    return Profile(model=str(options.path), threads=options.threads, bandwidth=bandwidth, prompt=part)


def _run(
    kernels: list[list[Event]], micros: list[int], runs: int, tokens: int, seconds: float, names: Mapping[str, str]
) -> Run:
    """Put the events of equal runs together: medians, since other programs disturb some of them."""
    pieces = max(1, len(micros) // runs)  # a long prompt is read in several
    totals = [sum(micros[begin : begin + pieces]) for begin in range(0, len(micros), pieces)]
    micros_of: dict[str, list[int]] = {}
    kinds: dict[str, dict[str, None]] = {}
    for number, events in enumerate(kernels):
        for event in events:
            name = names.get(event.node, event.node)
            micros_of.setdefault(name, [0] * len(totals))[number // pieces] += event.duration
            kinds.setdefault(name, {})[event.operator] = None
    medians = {name: statistics.median(values) for name, values in micros_of.items()}
    gaps = [max(0, total - sum(values[n] for values in micros_of.values())) for n, total in enumerate(totals)]
    gap = statistics.median(gaps)
    # A run that was disturbed nowhere; what is left of a disturbance is in the scale.
    scale = seconds / max(1e-9, sum(medians.values()) + gap)
    medians = {name: values * scale for name, values in medians.items()}
    gap *= scale
    profile_seconds = statistics.median(totals) / 1e6
    return Run(
        tokens=tokens,
        runs=runs,
        seconds=seconds,
        profiled=profile_seconds,
        nodes=medians,
        kernels={name: list(operators) for name, operators in kinds.items()},
        between=gap,
    )


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def probe() -> float:
    """Return how many bytes per second all processors together read from memory: the best of three sums."""
    workers = os.cpu_count() or 1
    parts = [np.ones(_PROBE_BYTES // workers // 8) for _ in range(workers)]
    with ThreadPoolExecutor(workers) as threads:
        best = min(_time(lambda: list(threads.map(np.sum, parts))) for _ in range(3))
    return sum(part.nbytes for part in parts) / best
