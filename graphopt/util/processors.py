"""How many processors this process may use, and work that is shared among them."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Part = TypeVar("Part")


def processors() -> int:
    """Return how many processors this process may use, or ``OMP_NUM_THREADS``, which workers have set."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdecimal() and int(setting):
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_in_threads(function: Callable[[Part], object], parts: Sequence[Part]) -> None:
    """Call a function with each part, in as many threads as there are processors that no other such call uses.

    This thread is one of them. Where another call ends before this one, its processors help here from the next part
    on. The first error ends the call, once those that run are done.
    """
    call = _Call(function, parts)
    with _condition:
        _calls.append(call)
    try:
        with _busy_thread():
            _start_helpers()
            while run_part := call.take_part():
                run_part()
    finally:
        with _condition:
            _calls.remove(call)  # also where this thread is interrupted, or helpers would go on with it
            _condition.wait_for(lambda: not call.running)
    if call.errors:
        raise call.errors[0]


class _Call:
    """A call of :func:`run_in_threads`: the parts that wait, how many run, and the errors of those that have run."""

    def __init__(self, function: Callable[[Any], object], parts: Sequence[Any]) -> None:
        self.function, self.waiting, self.running = function, deque(parts), 0
        self.errors: list[BaseException] = []

    def take_part(self) -> Callable[[], None] | None:
        """Return what runs a part that waited, or ``None`` where none does."""
        with _condition:
            if not self.waiting:
                return None
            self.running += 1
            return partial(self._run, self.waiting.popleft())

    def _run(self, part: Any) -> None:
        error: BaseException | None = None
        try:
            self.function(part)
        except BaseException as part_error:
            error = part_error
        with _condition:
            self.running -= 1
            if error is not None:
                self.waiting.clear()
                self.errors.append(error)
            _condition.notify_all()


# Calls that have not ended, the oldest first, and threads that work for them.
_calls: list[_Call] = []
_busy = 0
_condition = threading.Condition()
_thread = threading.local()


@contextmanager
def _busy_thread() -> Iterator[None]:
    """Count this thread among the busy ones, unless it is one already: a call may be within a part of another."""
    global _busy
    if getattr(_thread, "is_busy", False):
        yield
        return
    _thread.is_busy = True
    with _condition:
        _busy += 1
    try:
        yield
    finally:
        _thread.is_busy = False
        with _condition:
            _busy -= 1
        _start_helpers()


def _start_helpers() -> None:
    """Let idle processors work for the calls that there are."""
    global _busy
    with _condition:
        count = min(processors() - _busy, sum(len(call.waiting) for call in _calls))
        _busy += max(0, count)
    for _ in range(count):
        _helpers().submit(_help)


def _help() -> None:
    """Run parts of calls, until there are none, or more threads than processors."""
    _thread.is_busy = True
    while run_part := _next_part():
        run_part()
    _thread.is_busy = False


def _next_part() -> Callable[[], None] | None:
    """Return what runs a part of the oldest call that has one, or ``None`` where this helper is not needed any more."""
    global _busy
    with _condition:
        for call in _calls if _busy <= processors() else ():
            if run_part := call.take_part():
                return run_part
        _busy -= 1
        return None


@cache
def _helpers() -> ThreadPoolExecutor:
    """Return threads that wait for work: to begin one takes longer than many a part."""
    return ThreadPoolExecutor(max(1, processors() - 1), "graphopt-helper")
