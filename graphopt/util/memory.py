"""Memory that is left, of the machine and of the container that the process is in; and memory that was freed."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path("/")
# Parameters of mallopt(3). glibc itself arrives at 32 and 64 MiB when a process has freed an array of 32 MiB.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LEAST_MAPPED, _MOST_FREE = 32 << 20, 256 << 20


def keep_freed_memory() -> None:
    """Let this process keep what it frees, up to 256 MiB, and map only arrays of 32 MiB and more anew.

    glibc gives memory back and asks for it again: without this call ``optimize -r mini`` has 1.4 times the page faults.
    ``MALLOC_TRIM_THRESHOLD_``, which Dask sets for its workers, ends its own adaptation: then each
    array of 128 KiB is mapped and given back, and rounding a matrix takes twice as long. Where the C library is not
    glibc nothing is changed.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_TRIM_THRESHOLD, _MOST_FREE)
        set_option(_MMAP_THRESHOLD, _LEAST_MAPPED)


def available_memory(root: Path = _ROOT) -> int:
    """Return the bytes of memory that a process here could still allocate.

    On Linux that is what the kernel reports as available, or less where a control group, such as a container's, has a
    limit (https://docs.kernel.org/admin-guide/cgroup-v2.html, and version 1). A group's file cache counts as free, as
    the kernel reclaims it when needed. Elsewhere only unused memory counts.

    Args:
        root: where /proc and /sys are.
    """
    candidates = list(_left_in_groups(root))
    with contextlib.suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return max(0, min([1024 * int(line.split()[1]), *candidates]))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield the memory left to each control group of this process that has a limit."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, name = line.split(":", 2)
            if number == "0":
                yield from _up(root / "sys/fs/cgroup", name, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                yield from _up(root / "sys/fs/cgroup/memory", name, *names)


def _up(mount: Path, name: str, limit: str, used: str, files: str) -> Iterator[int]:
    # A container often sees its own group as the root, whatever its name; groups that do not exist are skipped.
    group = mount / name.lstrip("/")
    for folder in (group, *group.parents):
        if folder.is_relative_to(mount):
            with contextlib.suppress(OSError, ValueError):
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                usage = int((folder / used).read_text()) - int(statistics.get(files, 0))
                yield int((folder / limit).read_text()) - usage
