"""How many processors this process may use, and work that is shared among them."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Part = TypeVar("Part")

_lock = threading.Lock()
_busy = 0


def processors() -> int:
    """Return how many processors this process may use, or ``OMP_NUM_THREADS``, which workers have set."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdecimal() and int(setting):
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_in_threads(function: Callable[[Part], object], parts: Sequence[Part]) -> None:
    """Call a function with each part, in as many threads as there are processors that no other such call uses.

    This thread is one of them. The first error ends the call, once those that run are done.
    """
    global _busy
    with _lock:
        threads = max(1, min(len(parts), processors() - _busy))
        _busy += threads
    waiting = deque(parts)

    def work() -> None:
        with suppress(IndexError):
            while True:
                part = waiting.popleft()
                try:
                    function(part)
                except BaseException as error:
                    waiting.clear()
                    errors.append(error)

    errors: list[BaseException] = []
    try:
        helpers = [_helpers().submit(work) for _ in range(threads - 1)]
        work()
        # what has not begun would find nothing to do
        wait([helper for helper in helpers if not helper.cancel()])
    finally:
        with _lock:
            _busy -= threads
    if errors:
        raise errors[0]


@cache
def _helpers() -> ThreadPoolExecutor:
    """Return threads that wait for work: to begin one takes longer than many a part."""
    return ThreadPoolExecutor(max(1, processors() - 1), "graphopt-helper")
