"""The evaluator: the weights of a model, each computed once, by any ``concurrent.futures.Executor``.

Expressions that share what is computed together (codes and scales of one rounding) are one task; a task is evaluated by
one worker, in the memory of its largest tensor, and writes to the disk itself. What is computed, and in which blocks,
follows from the expression alone: any number of workers gives the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, TypeVar

from graphopt.errors import GraphoptError
from graphopt.graph.weights.disk import require_space
from graphopt.graph.weights.expression import Bundle, Expression, Node, nodes_below
from graphopt.graph.weights.leaves import Inline, StoredBytes, origins_of
from graphopt.graph.weights.store import Store, StoreEntry
from graphopt.graph.weights.tensor import WeightTensor
from graphopt.util.processors import processors

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir as ir

Task = TypeVar("Task")
Result = TypeVar("Result")

OnTensor = Callable[[int, int], None]
"""Called with how many tensors are done, of how many."""

# Bytes that tasks of threads may read together where the largest reads less: else the embedding of a small model, which
# is most of its weights, would be evaluated by one thread alone.
_ROOM = 1 << 28

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class DistantExecutor(Executor, ABC):
    """An executor whose processes may be on other machines: it is told what folder they share, how large tasks are."""

    @property
    @abstractmethod
    def state(self) -> str:
        """How many processes there are, and what else is worth a few words of progress."""

    @abstractmethod
    def prepare(self, folder: Path, files: Sequence[Path]) -> None:
        """Confirm that every process can do the tasks that follow.

        Args:
            folder: where data is exchanged; every process must be able to write to it.
            files: files and folders that tasks read besides.

        Raises:
            InputError: a process sees another folder, other files, or computes other bytes; names it.
        """

    @abstractmethod
    def submit_sized(self, size: int, function: Callable[[Task], Result], task: Task) -> Future[Result]:
        """As ``submit``: large tasks first, and to processes that have the memory for them.

        Args:
            size: the bytes that the task reads.
            function: what is called; it can be imported.
            task: what it is called with.
        """


@contextlib.contextmanager
def workers(jobs: int | Executor, folder: Path | None = None, files: Sequence[Path] = ()) -> Iterator[Executor | None]:
    """Give an executor of ``jobs`` processes, or ``None``, which is this process and its threads, for one job.

    Processes are spawned, not forked, since a fork of a process with threads may hang: a script that asks for several
    jobs keeps its own work behind ``if __name__ == "__main__"``. They share the processors: libraries of linear algebra
    get as many threads in each as there are processors for it. They end when this process ends, however it does.

    Args:
        jobs: how many processes, or an executor of the caller's, which is not shut down.
        folder: the work folder, by which processes on other machines exchange data.
        files: what tasks read besides.

    Raises:
        InputError: a process on another machine cannot do the tasks.
    """
    if isinstance(jobs, DistantExecutor) and folder is not None:
        jobs.prepare(folder, files)
    if isinstance(jobs, Executor) or jobs == 1:
        yield jobs if isinstance(jobs, Executor) else None
        return
    if jobs < 1:
        raise ValueError(f"there cannot be {jobs} jobs")
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, threads))
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _end_with_parent)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def stage_of(text: str, executor: Executor | None) -> str:
    """Return the name of a stage, with the state of processes on other machines that work at it."""
    return f"{text}, {executor.state}" if isinstance(executor, DistantExecutor) else text


def run_tasks(
    executor: Executor | None,
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    sizes: Sequence[int] | None = None,
) -> Iterator[tuple[int, Result]]:
    """Yield the number of each task with its result, as they are done; the first error ends the others.

    Args:
        executor: what runs them; ``None`` for threads of this process.
        function: what is called for each.
        tasks: what it is called with.
        sizes: the bytes that each task reads. Threads share the memory of the largest, or of 256 MiB if that is more:
            tasks run beside one another as long as they are not larger together. Without sizes there is one thread.
            A :class:`DistantExecutor` begins with the largest.

    Raises:
        GraphoptError: a worker process died.
    """
    if executor is None:
        yield from _in_threads(function, tasks, sizes)
        return
    futures: dict[Future[Result], int] = {}
    try:
        for number, task in enumerate(tasks):
            if isinstance(executor, DistantExecutor):
                futures[executor.submit_sized(sizes[number] if sizes else 0, function, task)] = number
            else:
                futures[executor.submit(function, task)] = number
        for future in as_completed(list(futures)):
            yield futures.pop(future), future.result()
    except BrokenProcessPool as error:
        raise GraphoptError(
            "a worker process ended before it was done, perhaps for want of memory",
            remedy="start again with fewer --jobs; what is done already is not lost where there is a work folder",
        ) from error
    finally:
        for future in futures:
            future.cancel()


def _in_threads(
    function: Callable[[Task], Result], tasks: Sequence[Task], sizes: Sequence[int] | None
) -> Iterator[tuple[int, Result]]:
    threads = 1 if sizes is None else min(processors(), len(tasks))
    if threads < 2 or sizes is None:
        yield from ((number, function(task)) for number, task in enumerate(tasks))
        return
    room, used, numbers = max(*sizes, _ROOM), 0, deque(range(len(tasks)))
    running: dict[Future[Result], int] = {}
    with ThreadPoolExecutor(threads) as pool:
        while running or numbers:
            while numbers and len(running) < threads and used + sizes[numbers[0]] <= room:
                number = numbers.popleft()
                running[pool.submit(function, tasks[number])] = number
                used += sizes[number]
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number = running.pop(future)
                used -= sizes[number]
                yield number, future.result()


def group_expressions(expressions: Sequence[Expression]) -> list[list[int]]:
    """Return the numbers of expressions in groups that share what is computed together or kept, the largest first."""
    import networkx as nx  # as slow to import as numpy, and a session needs none

    graph: nx.Graph[object] = nx.Graph()
    for number, expression in enumerate(expressions):
        graph.add_node(number)
        joint = (node for node in nodes_below(expression) if isinstance(node, (Bundle, StoreEntry)))
        graph.add_edges_from((number, node) for node in joint)
    groups = [
        sorted(member for member in members if isinstance(member, int)) for members in nx.connected_components(graph)
    ]
    return sorted(groups, key=lambda group: (-cost_of([expressions[number] for number in group]), group))


def cost_of(expressions: Sequence[Expression]) -> int:
    """Return the bytes of all leaves of some expressions: what evaluating them takes is about proportional."""
    nodes: set[Node] = {node for expression in expressions for node in nodes_below(expression)}
    return sum(node.nbytes for node in nodes if isinstance(node, Expression) and not node.children)


class Evaluator:
    """Evaluates the weights of models into a store.

    Args:
        store: where values are kept.
        executor: what evaluates them; ``None`` for this process.
    """

    def __init__(self, store: Store, executor: Executor | None = None) -> None:
        self.store, self.executor = store, executor

    def settle(self, model: ir.Model, on_tensor: OnTensor | None = None) -> None:
        """Evaluate every weight of a model that is not evaluated yet, and let it be read from the store.

        Raises:
            InputError: the disk is too small for them.
        """
        weights = computed_weights(model)
        results = self.values([tensor.expression for _, tensor in weights], on_tensor)
        for (value, tensor), result in zip(weights, results, strict=True):
            origins = origins_of(tensor.expression)
            result = dataclasses.replace(result, origins=origins) if origins else result
            value.const_value = result.tensor(tensor.name)

    def values(self, expressions: Sequence[Expression], on_tensor: OnTensor | None = None) -> list[StoredBytes]:
        """Return the stored values of expressions, evaluated where they are not in the store yet.

        Raises:
            InputError: the disk is too small for them.
        """
        values = [self.store.find(expression) for expression in expressions]
        missing = [number for number, value in enumerate(values) if value is None]
        if missing:
            self.store.folder.mkdir(parents=True, exist_ok=True)
            require_space(self.store.folder, sum(expressions[number].nbytes for number in missing))
            self._evaluate(expressions, missing, values, on_tensor)
        return [value for value in values if value is not None]

    def _evaluate(
        self,
        expressions: Sequence[Expression],
        missing: list[int],
        values: list[StoredBytes | None],
        on_tensor: OnTensor | None,
    ) -> None:
        """Fill in those of ``values`` that are missing."""
        lacking = [expressions[number] for number in missing]
        groups = group_expressions(lacking)
        tasks = [(self.store, [lacking[index] for index in group]) for group in groups]
        count = len(values) - len(missing)
        for task, results in run_tasks(self.executor, _obtain, tasks, [cost_of(batch) for _, batch in tasks]):
            for index, value in zip(groups[task], results, strict=True):
                values[missing[index]] = value
            count += len(results)
            if on_tensor is not None:
                on_tensor(count, len(values))


def computed_weights(model: ir.Model) -> list[tuple[ir.Value, WeightTensor]]:
    """Return the weights of a model that are computed when they are read."""
    return [
        (value, value.const_value)
        for graph in model.graphs()
        for value in graph.initializers.values()
        if isinstance(value.const_value, WeightTensor)
        and not isinstance(value.const_value.expression, (StoredBytes, Inline))
    ]


def _obtain(task: tuple[Store, list[Expression]]) -> list[StoredBytes]:
    store, expressions = task
    return [store.obtain(expression) for expression in expressions]


def _end_with_parent() -> None:
    """Let this worker end when the process that started it ends, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
