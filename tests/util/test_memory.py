from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphopt.util.memory import available_memory

MEGABYTE = 1 << 20


def machine(root: Path, groups: str, **limits: tuple[str, str, str, int, int]) -> Path:
    """Make a machine with 1000 MB to give: its groups, and by folder: limit, its file, the file of what is used, MB."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 4 kB\nMemAvailable: {1000 * 1024} kB\nBuffers: 1 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for folder, (limit, limit_file, used_file, used, files) in limits.items():
        group = root / "sys/fs/cgroup" / folder
        group.mkdir(parents=True, exist_ok=True)
        (group / limit_file).write_text(limit + "\n")
        (group / used_file).write_text(f"{used * MEGABYTE}\n")
        name = "inactive_file" if limit_file == "memory.max" else "total_inactive_file"
        (group / "memory.stat").write_text(f"anon 5\n{name} {files * MEGABYTE}\n")
    return root


def second(limit: str, used: int, files: int = 0) -> tuple[str, str, str, int, int]:
    return limit, "memory.max", "memory.current", used, files


def first(limit: str, used: int, files: int = 0) -> tuple[str, str, str, int, int]:
    return limit, "memory.limit_in_bytes", "memory.usage_in_bytes", used, files


def test_a_machine_without_groups(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, "0::/\n")) == 1000 * MEGABYTE


def test_a_group_has_less_than_the_machine(tmp_path: Path) -> None:
    limits = {"a/b": second(str(600 * MEGABYTE), 300, 100)}
    assert available_memory(machine(tmp_path, "0::/a/b\n", **limits)) == 400 * MEGABYTE


def test_the_group_above_may_have_less(tmp_path: Path) -> None:
    limits = {"a/b": second("max", 10), "a": second(str(500 * MEGABYTE), 450)}
    assert available_memory(machine(tmp_path, "0::/a/b\n", **limits)) == 50 * MEGABYTE


def test_a_group_that_is_seen_as_the_root(tmp_path: Path) -> None:
    limits = {".": second(str(200 * MEGABYTE), 50)}
    assert available_memory(machine(tmp_path, "0::/docker/0123\n", **limits)) == 150 * MEGABYTE


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    no_limit = str((1 << 63) - 4096)
    limits = {"memory/a": first(str(300 * MEGABYTE), 290, 40), "memory": first(no_limit, 900)}
    groups = "5:cpu,cpuacct:/c\n4:memory:/a\n"
    assert available_memory(machine(tmp_path, groups, **limits)) == 50 * MEGABYTE


def test_a_group_that_is_full_has_nothing(tmp_path: Path) -> None:
    limits = {"a": second(str(100 * MEGABYTE), 120)}
    assert available_memory(machine(tmp_path, "0::/a\n", **limits)) == 0


@pytest.mark.parametrize("groups", ["", "nonsense\n", "0::/a\n"])
def test_what_cannot_be_read_limits_nothing(tmp_path: Path, groups: str) -> None:
    assert available_memory(machine(tmp_path, groups, a=("?", "memory.max", "memory.current", 1, 0))) == 1000 * MEGABYTE


def test_here(tmp_path: Path) -> None:
    assert 0 < available_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # another system than Linux
    assert available_memory(tmp_path) > 0


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_arrays_are_not_mapped_anew_where_the_environment_asks_for_it() -> None:
    """An array of 4 MiB has 1024 pages: without the call each of 20 is mapped, with it only the first."""
    program = (
        "import resource, numpy, sys\n"
        "from graphopt.util.memory import keep_freed_memory\n"
        "if sys.argv[1] == 'keep': keep_freed_memory()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(20): numpy.ones(1 << 19)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    # Large pages would hide the faults.
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "65536", "NUMPY_MADVISE_HUGEPAGE": "0"}
    faults = {
        mode: int(subprocess.check_output([sys.executable, "-c", program, mode], env=environment, text=True))
        for mode in ("leave", "keep")
    }
    assert faults["leave"] > 15 * 1024
    assert faults["keep"] < 2 * 1024
