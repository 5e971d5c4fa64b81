"""An executor on real workers of Dask: they die, join late, see other folders; the scheduler goes and comes back."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphopt.compile.clusters import conditions as conditions_module
from graphopt.compile.clusters import executor as executor_module
from graphopt.compile.clusters.executor import ClusterExecutor, Worker, _Job, _suitable_workers, memory_of
from graphopt.compile.clusters.kinds.scheduler import Scheduler
from graphopt.errors import GraphoptError, InputError
from graphopt.graph.weights.evaluator import Evaluator, run_tasks
from graphopt.graph.weights.store import Store
from tests.compile.clusters import errands
from tests.compile.clusters.test_parcels import BOUND
from tests.graph.weights.test_evaluator import rewritten, save_bytes
from tests.ports import free_port

pytest.importorskip("distributed", reason="distributed is not installed, of the extra `cluster`")


def wait_until(condition: Any, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def test_functions_run_and_their_errors_arrive(executor: ClusterExecutor) -> None:
    assert executor.submit(errands.double, 21).result(20) == 42
    assert executor.submit(int, "ff", base=16).result(20) == 255
    pids = {pid for _, pid in run_tasks(executor, errands.process_of, range(6))}
    assert os.getpid() not in pids
    assert executor.state == "2 workers"
    with pytest.raises(InputError, match=r"no \[file=model.onnx, tensor=w, shape=\[2, 3\]\]: give another") as refusal:
        executor.submit(errands.refuse, 0).result(20)
    assert refusal.value.tensor == "w"
    with pytest.raises(InputError, match="the disk is full: 1,000.0 MB are needed"):
        executor.submit(errands.fill_the_disk, "/tmp").result(20)


def test_weights_of_a_cluster_are_those_of_one_process_and_no_data_passes_its_scheduler(
    executor: ClusterExecutor, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages, submit = [], client.submit

    def measure(function: Any, *arguments: Any, **options: Any) -> Any:
        messages.append(len(pickle.dumps((function, arguments))))
        return submit(function, *arguments, **options)

    monkeypatch.setattr(client, "submit", measure)
    expected = save_bytes(rewritten(), tmp_path / "here")
    settled_model = rewritten()
    Evaluator(Store(tmp_path / "store"), executor).settle(settled_model)
    assert save_bytes(settled_model, tmp_path / "settled", executor=executor) == expected
    assert save_bytes(rewritten(), tmp_path / "cluster", executor=executor) == expected
    array = np.random.default_rng(0).standard_normal((300, 300))
    assert np.array_equal(executor.submit_sized(array.nbytes, errands.doubled_array, array).result(20), 2 * array)
    assert len(messages) > 10  # else nothing went to workers, and the bound below would hold for nothing
    executor.prepare(tmp_path / "other", [])
    assert not (tmp_path / "parcels").exists()  # what was sent is gone
    # the parcel, and what must hold on the worker
    assert max(messages) <= BOUND + 2048


def test_another_version_is_refused_by_name(
    executor: ClusterExecutor, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_versions = {**conditions_module.versions(), "numpy": "1.0", "graphopt": "0.0.1 (0)"}
    monkeypatch.setattr(conditions_module, "versions", lambda: other_versions)
    with pytest.raises(
        InputError, match=r"(?s)2 of 2 workers cannot compute.*numpy is [\d.]+ here, and 1.0 there"
    ) as refusal:
        executor.prepare(tmp_path)
    assert all(address in str(refusal.value) for address in client.scheduler_info()["workers"])
    assert "install the same versions" in str(refusal.value)


def test_a_folder_that_is_another_one_for_workers_is_refused_by_its_path(
    executor: ClusterExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Workers have another current folder, so the same path is not the same folder there.
    with pytest.raises(InputError, match=r"(?s)worker tcp://\S+ on .*the folder /proc/self/cwd is not here.*--work"):
        executor.prepare(Path("/proc/self/cwd"))
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(InputError, match=r"/proc/self/cwd/model.onnx is not here"):
        executor.prepare(tmp_path, [Path("/proc/self/cwd/model.onnx")])
    executor.prepare(tmp_path, [tmp_path, tmp_path / "model.onnx"])


def test_a_result_that_cannot_be_read_is_an_error(executor: ClusterExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(parcel: object) -> object:
        raise PermissionError(parcel)

    monkeypatch.setattr(executor_module, "unwrap", unreadable)
    with pytest.raises(PermissionError):
        executor.submit(errands.double, 3).result(20)


def test_cancelled_tasks_never_begin(executor: ClusterExecutor, tmp_path: Path) -> None:
    tasks = [executor.submit_sized(0, errands.write_slowly, (str(tmp_path), n)) for n in range(20)]
    assert all(task.cancel() for task in tasks[10:])
    assert [task.result(20) for task in tasks[:10]] == list(range(10))
    assert {int(file.stem) for file in tmp_path.glob("*.*") if file.suffix[1:].isdecimal()} == set(range(10))


def test_large_tasks_come_first(executor: ClusterExecutor, tmp_path: Path) -> None:
    first = [executor.submit_sized(10, errands.write_slowly, (str(tmp_path), n)) for n in range(4)]  # fill the workers
    sizes = [1, 5, 3, 4, 2]
    second = [executor.submit_sized(size, errands.write_slowly, (str(tmp_path), 10 + size)) for size in sizes]
    for task in first + second:
        task.result(20)
    files = sorted(tmp_path.glob("1?.*"), key=lambda file: file.stat().st_mtime_ns)
    order = [int(file.stem) - 10 for file in files]
    assert order.index(5) < order.index(1)
    assert order.index(4) < order.index(1)


def test_a_worker_with_other_instructions_that_joins_late_gets_no_task(
    executor: ClusterExecutor, client: Any, tmp_path: Path
) -> None:
    address = client.scheduler.address
    with errands.worker(address, "--nthreads", "4", GRAPHOPT_OPS_ISA="scalar") as late:
        client.wait_for_workers(3, timeout=20)
        wait_until(lambda: executor.state.startswith("3"))
        tasks = [executor.submit_sized(0, errands.write_slowly, (str(tmp_path), n)) for n in range(12)]
        assert [task.result(20) for task in tasks] == list(range(12))
        assert not list(tmp_path.glob(f"*.{late.pid}"))
        assert executor.state.startswith("2 workers, 1 left out (")
        assert "instructions of kernels is scalar here" in executor.state
        with pytest.raises(InputError, match=r"(?s)1 of 3 workers.*instructions of kernels is scalar"):
            executor.prepare(tmp_path)
    wait_until(lambda: executor.state == "2 workers")


def test_workers_with_little_memory_get_small_tasks() -> None:
    limits = {"large": 8 << 30, "small": 2 << 30, "shared": 4 << 30}
    workers = {name: Worker(name, 4 if name == "shared" else 1, limit) for name, limit in limits.items()}

    def workers_for(size: int) -> set[str]:
        return set(_suitable_workers(_Job(0, size, "", None, None, Future()), workers))  # type: ignore[arg-type]

    assert workers_for(1 << 20) == {"large", "small", "shared"}
    assert memory_of(200 << 20) > 1 << 30  # of four threads each has 1 GiB
    assert workers_for(200 << 20) == {"large", "small"}
    assert workers_for(1 << 30) == {"large"}
    assert workers_for(8 << 30) == {"large"}  # fits nowhere, and has the best chance there


def test_a_scheduler_that_is_restarted_gets_what_is_not_done(tmp_path: Path) -> None:
    port = free_port()
    with contextlib.ExitStack() as processes:
        scheduler = processes.enter_context(errands.scheduler(port))
        wait_until(lambda: errands.listens(port), 30)
        client = processes.enter_context(Scheduler().connect(f"dask://127.0.0.1:{port}", None))
        executor = ClusterExecutor(client, patience=20)
        executor.prepare(tmp_path)
        tasks = [executor.submit_sized(0, errands.write_slowly, (str(tmp_path), n)) for n in range(8)]
        tasks[1].result(20)
        scheduler.kill()
        scheduler.wait()
        second_scheduler = processes.enter_context(errands.scheduler(port))
        assert [task.result(30) for task in tasks] == list(range(8))
        # and where it does not come back, that is said
        executor._patience = 1.0
        lost_task = executor.submit_sized(0, errands.write_slowly, (str(tmp_path), 9))
        second_scheduler.kill()
        with pytest.raises(
            GraphoptError, match=r"scheduler of the cluster, tcp://\S+, does not answer.*goes on with what is done"
        ):
            lost_task.result(20)
        with pytest.raises(GraphoptError, match="does not answer"):
            executor.submit(errands.double, 1).result(20)
        executor.shutdown(cancel_futures=True)


def test_what_a_worker_was_at_when_it_died_is_done_by_another(executor: ClusterExecutor, tmp_path: Path) -> None:
    results = {executor.submit_sized(0, errands.write_slowly, (str(tmp_path), n)): n for n in range(12)}
    wait_until(lambda: list(tmp_path.glob("0.*")))
    victim = int(next(tmp_path.glob("0.*")).suffix[1:])
    os.kill(victim, signal.SIGKILL)
    assert [future.result(20) for future in results] == list(range(12))
    assert len(list(tmp_path.glob("*.*"))) > 12  # something was begun twice


def test_a_task_that_kills_its_workers_ends_with_what_to_do(
    executor: ClusterExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "TRIES", 1)  # each costs a new worker
    task = executor.submit_sized(3_000_000, errands.die, None)
    with pytest.raises(GraphoptError, match=r"1 worker ended at the same task.*reads 3.0 MB.*more memory"):
        task.result(30)
    assert executor.submit(errands.double, 1).result(20) == 2
