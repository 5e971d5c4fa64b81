"""What front and workers have in common: how they find one another, and that they end with what started them."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys

NAMESPACE = "graphopt"
"""Under which Dynamo lists the workers."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Let this process get SIGTERM when its parent ends in any way; on Linux only."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
