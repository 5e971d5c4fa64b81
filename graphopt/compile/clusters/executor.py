"""An executor of ``concurrent.futures`` on the workers of Dask, which lasts longer than they do.

A worker that dies loses what it was at, and another one does it. A scheduler that is restarted knows of no task: those
that are not done are submitted again, as every task gives the same bytes whenever it runs. A worker that joins late and
computes other bytes, or sees other files, gets no task. Workers with less memory get small tasks.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import queue
import shutil
import socket
import threading
import time
import uuid
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphopt.compile.clusters.conditions import Conditions, conditions_for, forget, versions
from graphopt.compile.clusters.packages import distributed_package
from graphopt.compile.clusters.parcels import Parcel, unwrap, wrap
from graphopt.errors import GraphoptError, InputError
from graphopt.graph.weights.evaluator import DistantExecutor, Result, Task
from graphopt.util.memory import keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from distributed import Client

PATIENCE = 60.0
"""Seconds that a scheduler may be away, and that there may be no worker."""

CONNECTING = 4.0
"""Seconds for one try to connect: between tries within it, Dask waits longer and longer."""

TRIES = 3
"""How often a task is submitted on which Dask gave up, since workers died of it."""

_PERIOD = 1.0  # seconds between looks at the workers
_AHEAD = 2  # tasks for each thread of workers: one that runs, and one that waits

# What a task takes beside what it reads. GPTQ of a matrix in float32 makes a Cholesky factor and errors in float64.
_BASE, _TIMES = 200 << 20, 5


class UnfitWorkerError(Exception):
    """A worker cannot do what it was sent; its arguments are the address, and what is wrong."""


@dataclass(frozen=True)
class Worker:
    """A worker of the scheduler.

    Attributes:
        address: where it listens.
        threads: how many tasks it runs at once.
        memory: its limit for all of them, in bytes; 0 for none.
    """

    address: str
    threads: int
    memory: int

    def has_room(self, nbytes: int) -> bool:
        """Return whether each of its tasks may take so many bytes."""
        return not self.memory or nbytes <= self.memory // self.threads


@dataclass(eq=False)
class _Job:
    """A task, until its result is there."""

    number: int
    size: int
    name: str
    parcel: Parcel
    conditions: Conditions
    result: Future[Any]
    tries: int = 0
    addresses: frozenset[str] = frozenset()
    is_restricted: bool = False
    remote: Any = None

    @property
    def order(self) -> tuple[int, int]:
        return -self.size, self.number


@dataclass
class _Event:
    """What the thread that looks after tasks is told."""

    job: _Job
    remote: Any = None
    is_new: bool = False


class ClusterExecutor(DistantExecutor):
    """Runs tasks on workers of Dask.

    Args:
        client: of the scheduler; it stays open when the executor is shut down.
        patience: seconds that the scheduler may be away, or that there may be no worker.

    Attributes:
        client: the client; another one where the scheduler was away.

    Raises:
        InputError: no worker joined in that time.
    """

    def __init__(self, client: Client, patience: float = PATIENCE) -> None:
        self.client, self._patience = client, patience
        self._conditions = Conditions(versions())
        self._folder: Path | None = None
        self._numbers, self._prefix = itertools.count(), uuid.uuid4().hex[:8]
        self._waiting: list[_Job] = []
        self._running: set[_Job] = set()
        self._workers: dict[str, Worker] = {}
        self._unfit: dict[str, str] = {}
        self._error: GraphoptError | None = None
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._last_look = self._last_answer = self._last_seen = time.monotonic()
        self._address = str(client.scheduler_info()["address"])
        self._clients = contextlib.ExitStack()  # those that are connected later
        self._wait_for_workers()
        self._thread = threading.Thread(target=self._look_after, name="cluster", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """How many workers there are, and how many of them get no task."""
        unfit = len(self._unfit.keys() & self._workers.keys())
        count = len(self._workers) - unfit
        text = f"{count} worker{'' if count == 1 else 's'}"
        return f"{text}, {unfit} left out ({next(iter(self._unfit.values()))})" if unfit else text

    def prepare(self, folder: Path, files: Sequence[Path] = ()) -> None:
        """See :meth:`DistantExecutor.prepare`; workers that join later are asked with their first task."""
        self._forget()
        folder.mkdir(parents=True, exist_ok=True)
        conditions = conditions_for(folder.absolute(), files)
        self._conditions, self._folder = conditions, folder.absolute() / "parcels"
        answers = self.client.run(_answer, conditions, on_error="return")
        lines = []
        for address, answer in answers.items():
            title, faults = address, [f"it does not answer: {answer!r}"]
            if isinstance(answer, tuple):
                title, faults = f"{address} on {answer[0]}", answer[1]
            elif isinstance(answer, ImportError):
                faults = [f"it cannot import graphopt: {answer}"]
            lines += [f"worker {title}: {'; '.join(faults)}"] if faults else []
        if lines:
            raise InputError(
                f"{len(lines)} of {len(answers)} workers cannot compute what this process would:\n  "
                + "\n  ".join(lines),
                remedy="install the same versions, mount the folder at the same path (or name another with --work or "
                "--keep), or take these workers away",
            )

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """Run a function that can be imported on a worker."""
        return self._queue(0, fn.__name__, (_call, (fn, args, kwargs)))

    def submit_sized(self, size: int, function: Callable[[Task], Result], task: Task) -> Future[Result]:
        """See :meth:`DistantExecutor.submit_sized`."""
        return self._queue(size, getattr(function, "__name__", "task"), (function, task))

    def _queue(self, size: int, name: str, call: tuple[Callable[[Any], Any], Any]) -> Future[Any]:
        parcel = wrap(call, self._folder)
        job = _Job(next(self._numbers), size, name.strip("_"), parcel, self._conditions, Future())
        job.result.add_done_callback(lambda result: self._events.put(_Event(job)) if result.cancelled() else None)
        self._events.put(_Event(job, is_new=True))
        return job.result

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop; what runs is cancelled if that is asked for."""
        del wait  # there is no one to wait for: whoever asked has the results or wants none
        if cancel_futures:
            for job in [*self._waiting, *self._running]:
                job.result.cancel()
        self._events.put(None)
        self._thread.join()
        self._clients.close()
        self._forget()

    def _forget(self) -> None:
        """Remove what was sent by way of the shared folder."""
        forget(self._conditions)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # All that follows runs in one thread, so nothing of it is locked.

    def _look_after(self) -> None:
        """Hand tasks to the scheduler and results to who waits for them, until the executor is shut down."""
        while True:
            event: _Event | None = None
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=_PERIOD)
                if event is None:
                    self._give_up(GraphoptError("the cluster was shut down"))
                    return
            try:
                if event is not None:
                    self._take(event)
                if time.monotonic() > self._last_look + _PERIOD:
                    self._look_at_workers()
                self._dispatch()
            except GraphoptError as error:
                self._give_up(error)
            except Exception as error:  # whatever Dask raises: a thread that ends would let its caller wait for ever
                self._give_up(GraphoptError(f"the cluster failed: {type(error).__name__}: {error}"))

    def _take(self, event: _Event) -> None:
        job = event.job
        if event.is_new:
            if self._error is not None:
                _fail(job, self._error)
            else:
                bisect.insort(self._waiting, job, key=lambda job: job.order)
            return
        if job.result.done():
            self._drop(job)
        elif event.remote is job.remote and event.remote is not None:
            self._settle(job)

    def _drop(self, job: _Job) -> None:
        if job.remote is not None and not job.remote.done():
            job.remote.cancel()
        job.remote = None
        self._running.discard(job)
        with contextlib.suppress(ValueError):
            self._waiting.remove(job)

    def _settle(self, job: _Job) -> None:
        """Give the result of a task to who waits for it, or submit it again."""
        remote = job.remote
        self._running.discard(job)
        if remote.status == "finished":
            try:
                parcel = remote.result(timeout=self._patience)
            except Exception:  # the worker that held it is gone, and with the scheduler whoever could do it again
                return self._submit_again(job)
            try:
                value = unwrap(parcel)
            except Exception as error:  # its data cannot be read in the shared folder, and would not be another time
                return _fail(job, error)
            job.remote = None
            if job.result.set_running_or_notify_cancel():
                job.result.set_result(value)
            return None
        if remote.status != "error":  # cancelled: the scheduler is gone, or the workers that it was meant for
            return self._submit_again(job)
        return self._settle_error(job, remote.exception(timeout=self._patience))

    def _settle_error(self, job: _Job, error: BaseException) -> None:
        """Submit a task again where another worker may do it; else its error is the result."""
        dask = distributed_package().scheduler
        if isinstance(error, UnfitWorkerError):
            self._unfit[error.args[0]] = error.args[1]
            return self._submit_again(job)
        if isinstance(error, dask.NoValidWorkerError):
            return self._submit_again(job)
        if isinstance(error, MemoryError):
            return _fail(job, _too_large(job, 1, self._workers.values()))
        if not isinstance(error, dask.KilledWorker):
            return _fail(job, error)
        job.tries += 1
        if job.tries < TRIES:
            return self._submit_again(job)
        return _fail(job, _too_large(job, TRIES * (error.allowed_failures + 1), self._workers.values()))

    def _submit_again(self, job: _Job) -> None:
        job.remote = None
        bisect.insort(self._waiting, job, key=lambda job: job.order)

    def _dispatch(self) -> None:
        """Submit tasks, the largest first, as long as threads wait for them."""
        if not self._waiting or self.client.status != "running":
            return
        workers = {address: worker for address, worker in self._workers.items() if address not in self._unfit}
        for job in list(self._waiting):
            if len(self._running) >= _AHEAD * sum(worker.threads for worker in workers.values()):
                return
            addresses = frozenset(_suitable_workers(job, workers))
            threads = sum(workers[address].threads for address in addresses)
            if sum(running.addresses <= addresses for running in self._running) < _AHEAD * threads:
                self._waiting.remove(job)
                self._start(job, addresses)

    def _start(self, job: _Job, addresses: frozenset[str]) -> None:
        # Without a restriction, Dask may also choose workers that have joined meanwhile.
        job.addresses, job.is_restricted = addresses, addresses != self._workers.keys()
        job.remote = self.client.submit(
            _run,
            job.parcel,
            job.conditions,
            key=f"{job.name}-{self._prefix}-{job.number}-{uuid.uuid4().hex[:8]}",
            workers=sorted(addresses) if job.is_restricted else None,
            pure=False,
        )
        self._running.add(job)
        job.remote.add_done_callback(lambda remote: self._events.put(_Event(job, remote)))

    def _look_at_workers(self) -> None:
        """Learn which workers there are.

        Raises:
            GraphoptError: the scheduler is away for too long, or there is no worker for too long.
        """
        self._last_look = time.monotonic()
        if self.client.status != "running":
            return self._connect_again()
        with contextlib.suppress(OSError):
            self._workers = _workers_of(self.client)
            self._last_answer = self._last_look
        fit = self._workers.keys() - self._unfit.keys()
        for job in [job for job in self._running if job.is_restricted and not job.addresses & fit]:
            job.remote.cancel()
        if fit:
            self._last_seen = self._last_look
        elif self._last_look > self._last_seen + self._patience and (self._waiting or self._running):
            raise GraphoptError(
                f"the cluster has no worker for {self._patience:g} seconds"
                + (f"; left out: {self.state}" if self._unfit else ""),
                remedy="start some, and then the same command again: it goes on with what is done",
            )

    def _connect_again(self) -> None:
        """Wait for the scheduler; tasks that it had are cancelled, and so they are submitted again.

        Raises:
            GraphoptError: it is away for too long.
        """
        if self._last_look > self._last_answer + self._patience:
            raise GraphoptError(
                f"the scheduler of the cluster, {self._address}, does not answer for {self._patience:g} seconds",
                remedy="start it and its workers, and then the same command again: it goes on with what is done",
            )
        if self.client.status != "closed":
            return  # it tries to connect by itself
        with contextlib.suppress(OSError, ValueError):
            self.client = distributed_package().Client(self._address, timeout=CONNECTING, set_as_default=False)
            self._clients.enter_context(self.client)

    def _give_up(self, error: GraphoptError) -> None:
        self._error = error
        for job in [*self._waiting, *self._running]:
            self._drop(job)
            _fail(job, error)

    def _wait_for_workers(self) -> None:
        try:
            self.client.wait_for_workers(1, timeout=self._patience)
        except (OSError, TimeoutError) as error:
            raise InputError(
                f"the cluster has no worker for {self._patience:g} seconds",
                remedy="start some: `dask worker HOST:PORT --nthreads 1`",
            ) from error
        self._workers = _workers_of(self.client)


def _workers_of(client: Client) -> dict[str, Worker]:
    entries: Mapping[str, Any] = client.scheduler_info(n_workers=-1)["workers"]
    return {
        address: Worker(address, entry["nthreads"], entry["memory_limit"] or 0) for address, entry in entries.items()
    }


def _suitable_workers(job: _Job, workers: Mapping[str, Worker]) -> Collection[str]:
    """Return the workers that a task fits into: all if none is known to be large enough and all are alike."""
    fit = [address for address, worker in workers.items() if worker.has_room(memory_of(job.size))]
    if fit:
        return fit
    largest = max((worker.memory // worker.threads for worker in workers.values()), default=0)
    return [address for address, worker in workers.items() if worker.memory // worker.threads == largest]


def memory_of(size: int) -> int:
    """Return the bytes of memory that a worker may need for a task that reads ``size`` bytes."""
    return _BASE + _TIMES * size


def _too_large(job: _Job, deaths: int, workers: Collection[Worker]) -> GraphoptError:
    rooms = [worker.memory // worker.threads for worker in workers if worker.memory]
    room = f"; the largest has {max(rooms) / 1e6:,.0f} MB for a task" if rooms else ""
    return GraphoptError(
        f"{deaths} worker{'' if deaths == 1 else 's'} ended at the same task, perhaps for want of memory: it reads "
        f"{job.size / 1e6:,.1f} MB, and may need {memory_of(job.size) / 1e6:,.0f} MB{room}",
        remedy="give workers more memory, or fewer threads each, and start the same command again: it goes on with "
        "what is done",
    )


def _fail(job: _Job, error: BaseException) -> None:
    job.remote = None
    if not job.result.done() and job.result.set_running_or_notify_cancel():
        job.result.set_exception(error)


def _answer(conditions: Conditions) -> tuple[str, list[str]]:
    """Return the host of this process, and what does not hold in it."""
    return socket.gethostname(), conditions.faults()


def _call(task: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> object:
    function, arguments, options = task
    return function(*arguments, **options)


# Of the conditions that hold in this process.
_known_marks: set[str] = set()


def _run(parcel: Parcel, conditions: Conditions) -> Parcel:
    """Run a task in this process, if it fits."""
    if conditions.mark not in _known_marks:
        faults = conditions.faults()
        if faults:
            message = f"{socket.gethostname()}: {'; '.join(faults)}"
            raise UnfitWorkerError(distributed_package().get_worker().address, message)
        _known_marks.add(conditions.mark)
        keep_freed_memory()
    function, task = unwrap(parcel)
    return wrap(function(task), Path(parcel.folder) if parcel.folder else None)
