"""How many processors this process may use."""

from __future__ import annotations

import os


def processors() -> int:
    """Return how many processors this process may use, or ``OMP_NUM_THREADS``, which workers have set."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdecimal() and int(setting):
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
