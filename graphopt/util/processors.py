"""How many processors this process may use."""

from __future__ import annotations

import os


def processors() -> int:
    """Return how many processors this process may use, or ``OMP_NUM_THREADS``, which workers have set."""
    stated = os.environ.get("OMP_NUM_THREADS", "")
    if stated.isdecimal() and int(stated):
        return int(stated)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
