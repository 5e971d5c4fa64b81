"""Linear algebra in one thread: a sum's last bit may depend on how many threads share it."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from threadpoolctl import threadpool_limits

if TYPE_CHECKING:
    from collections.abc import Iterator

_lock = threading.Lock()
_inside = 0
_limits: threadpool_limits | None = None


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let BLAS and LAPACK compute in one thread inside the block, in all threads of the process that are in one.

    Without it a weight would depend on ``--jobs``, which decides how many threads a process gets.
    """
    global _inside, _limits
    with _lock:
        if not _inside:
            _limits = threadpool_limits(1, "blas")
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _limits is not None:
                _limits.restore_original_limits()
                _limits = None
