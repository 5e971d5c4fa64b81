"""Compare a cluster on this machine with one process: bytes of the result, and time.

    python tools/bench/cluster.py bytes FOLDER -o WORK --workers 1,2,4 --kill 10   # the same bytes, workers die or not
    python tools/bench/cluster.py gptq --workers 2                       # GPTQ of many matrices, each worker on a core

``bytes`` compiles FOLDER once by one process, or reuses that of an earlier run, and once for each number of workers;
with ``--kill S`` once more with the last number, and a worker is killed every S seconds. Statistics are collected once.

``gptq`` rounds matrices of random weights: one process on one core, and as many workers as cores, in turns. On a busy
machine seconds mean little: compare both with each other, and with the processor time that they got.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

# Run as a script, Python looks for modules in tools/ only; workers import this file again.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.artifact.artifact import MODEL
from graphopt.compile.calibration.inputs import collect
from graphopt.compile.clusters import ClusterExecutor, open_cluster
from graphopt.compile.pipeline import optimize
from graphopt.graph.weights import Expression, Inline, expression_of
from graphopt.graph.weights.evaluator import Evaluator
from graphopt.graph.weights.store import Store
from graphopt.numerics.formats import format_of
from graphopt.quantization.rounding.lazy_codes import quantize_lazily
from graphopt.quantization.rounding.methods.gptq import GPTQ
from graphopt.quantization.rounding.single_thread import one_thread

app = typer.Typer(help=__doc__)


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of model and weights."""
    files = sorted(folder.glob(f"{MODEL}*"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@contextlib.contextmanager
def killing(executor: ClusterExecutor, seconds: float | None, deaths: list[int]) -> Iterator[None]:
    """Kill a worker every ``seconds`` while the block lasts, and append its process id to ``deaths``.

    Only workers that have joined are killed: Dask does not replace one that dies while it starts.
    """
    end = threading.Event()

    def run() -> None:
        while not end.wait(seconds):
            with contextlib.suppress(OSError):
                for pid in list(executor.client.run(os.getpid, on_error="ignore").values())[:1]:
                    os.kill(pid, signal.SIGKILL)
                    deaths.append(pid)

    thread = threading.Thread(target=run, daemon=True)
    if seconds is not None:
        thread.start()
    try:
        yield
    finally:
        end.set()


@app.command("bytes")
def compare_bytes(
    folder: Path,
    work: Annotated[Path, typer.Option("-o", "--output", help="where results and statistics lie")],
    recipe: Annotated[str, typer.Option("-r", "--recipe")] = "small",
    workers: Annotated[str, typer.Option(help="numbers of workers")] = "1,2,4",
    kill: Annotated[float | None, typer.Option(help="seconds between deaths, in one run more")] = None,
) -> None:
    """Compile a model by one process and by clusters, and compare hashes."""
    work.mkdir(parents=True, exist_ok=True)
    statistics, plain = work / "statistics", work / "plain"
    options: dict[str, Any] = {"statistics": statistics, "quality_tokens": 0, "force": True, "overwrite": True}
    collect(folder, recipe, statistics)
    if not plain.exists():
        optimize(folder, recipe, plain, **options)
    plain_digests = digests(plain)
    print(json.dumps({"run": "one process", "files": plain_digests}), flush=True)
    counts = [int(count) for count in workers.split(",")]
    for count, seconds in [*((count, None) for count in counts), *([(counts[-1], kill)] if kill else [])]:
        deaths: list[int] = []
        begin = time.perf_counter()
        with open_cluster("dask://", count) as executor, killing(executor, seconds, deaths):
            optimize(folder, recipe, work / "cluster", jobs=executor, run=False, **options)
        row = {
            "run": f"{count} workers" + (f", one killed every {seconds:g} s" if seconds else ""),
            "same bytes": digests(work / "cluster") == plain_digests,
            "workers killed": len(deaths),
            "seconds": round(time.perf_counter() - begin, 1),
        }
        print(json.dumps(row), flush=True)


def matrices(count: int, size: int, folder: Path, seed: int) -> list[Expression]:
    """Return codes of random matrices by GPTQ, as expressions on stored bytes."""
    random = np.random.default_rng(seed)
    inputs = random.standard_normal((2 * size, size), np.float32)
    store = Store(folder)
    hessian = store.obtain(Inline.from_array(inputs.T @ inputs / np.float32(len(inputs))))
    expressions = []
    for _ in range(count):
        weight = store.obtain(Inline.from_array(random.standard_normal((size, size), np.float32)))
        parts = quantize_lazily(
            weight.tensor(), format_of("nl4"), 64, "least_squares", standard=False, method=GPTQ(), statistics=hessian
        )
        expressions.append(expression_of(parts["codes"]))
    return expressions


def pin(cores: set[int]) -> float:
    """Bind all threads of this process to cores, and return the processor time that it has used."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)
    return time.process_time()


def processor_seconds(_: object) -> float:
    """Return the processor time that this process has used."""
    return time.process_time()


@app.command("gptq")
def gptq(
    workers: int = 2,
    count: Annotated[int, typer.Option(help="matrices of a round")] = 8,
    size: Annotated[int, typer.Option(help="their rows and columns")] = 1536,
    rounds: int = 3,
) -> None:
    """Round matrices by one process on one core, and by workers on a core each, turn by turn."""
    cores = sorted(os.sched_getaffinity(0))[:workers]
    if len(cores) < workers:
        raise typer.BadParameter(f"{workers} workers need as many cores, and there are {len(cores)}")
    ratios = []
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder, open_cluster("dask://", workers) as executor:
        _pin_workers(executor, cores)
        for number in range(rounds):
            store = Path(folder) / str(number)
            expressions = matrices(count, size, store / "inputs", number)
            executor.prepare(store, [])
            begin, processor_begin = time.perf_counter(), _used(executor)
            cluster_codes = Evaluator(Store(store / "cluster"), executor).values(expressions)
            cluster, cluster_used = time.perf_counter() - begin, _used(executor) - processor_begin
            all_cores = os.sched_getaffinity(0)
            processor_begin, begin = pin({cores[0]}), time.perf_counter()
            with one_thread():
                one_core_codes = [Store(store / "alone").obtain(expression) for expression in expressions]
            plain, plain_used = time.perf_counter() - begin, time.process_time() - processor_begin
            pin(all_cores)
            assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(one_core_codes, cluster_codes, strict=True))
            ratios.append(plain / cluster)
            row = {
                "one core": {"seconds": round(plain, 2), "of a processor": round(plain_used, 2)},
                f"{workers} workers": {"seconds": round(cluster, 2), "of processors": round(cluster_used, 2)},
                "times as fast": round(plain / cluster, 2),
            }
            print(json.dumps(row), flush=True)
    print(json.dumps({"median": round(float(np.median(ratios)), 2), "same codes": True}))


def _pin_workers(executor: ClusterExecutor, cores: list[int]) -> None:
    addresses = sorted(executor.client.scheduler_info(n_workers=-1)["workers"])
    for address, core in zip(addresses, cores, strict=True):
        executor.client.run(pin, {core}, workers=[address])


def _used(executor: ClusterExecutor) -> float:
    return float(sum(executor.client.run(processor_seconds, None).values()))


if __name__ == "__main__":
    app()
