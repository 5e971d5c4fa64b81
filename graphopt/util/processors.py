"""How many processors this process may use, and work that is shared among them."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
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

    The first error ends the call, once those that run are done.
    """
    global _busy
    with _lock:
        threads = max(1, min(len(parts), processors() - _busy))
        _busy += threads
    try:
        if threads == 1:
            for part in parts:
                function(part)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(function, parts))
    finally:
        with _lock:
            _busy -= threads
