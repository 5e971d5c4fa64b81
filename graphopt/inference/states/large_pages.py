"""Arrays in large pages of the system."""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_ALIGNMENT = 64
"""Bytes: the line of a processor's cache, and its widest register."""

_LARGE_PAGE, _BLOCK = 1 << 21, 1 << 25


def aligned_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Return zeros that begin at a multiple of 64 bytes; memory is taken as it is written."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return _room.take(size).view(dtype).reshape(shape)


def _map_memory(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    # Shared memory, Python's default here, has no large pages.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _Room:
    """Memory in large pages of the system, which take a processor fewer address lookups: small arrays share them.

    A block goes back to the system with the last array in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._block: Array = np.zeros(0, np.uint8)
        self._used = 0

    def take(self, size: int) -> Array:
        """Return ``size`` bytes of zeros."""
        with self._lock:
            if size > len(self._block) - self._used:
                memory = _map_memory(max(size, _BLOCK) + _LARGE_PAGE)
                raw = np.frombuffer(memory, np.uint8)
                self._block, self._used = raw[-raw.ctypes.data % _LARGE_PAGE :], 0
            begin = self._used
            self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
            return self._block[begin : begin + size]


_room = _Room()
