"""The machine: what it is called, how large its last-level cache is, how fast its memory is."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tools.bench.parts.unavailable import UnavailableError

_MEBI = 1 << 20


def describe() -> str:
    """Return the processor's name and the number of its cores."""
    name = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        model_names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        name = model_names[0] if model_names else name
    return f"{name}, {os.cpu_count()} cores, {platform.system()}"


def last_level_cache() -> int:
    """Return the bytes of the largest cache, or 32 MiB where the system does not tell."""
    sizes = [32 * _MEBI]
    units = {"K": 1 << 10, "M": _MEBI}
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text[:-1]) * units[text[-1]] if text[-1:] in units else 0)
    return max(sizes)


class OtherLoad:
    """The load by other processes since this object was made; engines that wait by spinning suffer most from it."""

    def __init__(self) -> None:
        self._begin = _processor_seconds()

    def share(self) -> float:
        """Return the share of all cores' time that other processes took; children of this one count once they ended."""
        (busy, idle, own_end), (busy_then, idle_then, own_begin) = _processor_seconds(), self._begin
        total = busy - busy_then + idle - idle_then
        return max(0.0, busy - busy_then - (own_end - own_begin)) / total if total else 0.0


def quiet(share: float) -> str:
    """Return a sentence on the share of the cores' time that other processes took, with a warning if it is over 5%."""
    sentence = f"other processes took {share:.0%} of the cores' time"
    return sentence if share <= 0.05 else f"{sentence}: NOT TO BE QUOTED"


def _processor_seconds() -> tuple[float, float, float]:
    """Return the seconds that all cores were busy, were idle, and that this process and its children took."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return 0.0, 0.0, 0.0
    user, nice, system, idle, waiting, *interrupts = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
    ticks = os.sysconf("SC_CLK_TCK")
    busy = user + nice + system + sum(interrupts)
    return busy / ticks, (idle + waiting) / ticks, sum(os.times()[:4])


def compile_c(source: Path, work: Path, options: Sequence[str] = ()) -> Path:
    """Compile a file of C for this very machine and return the shared object.

    Raises:
        UnavailableError: there is no compiler, or it refuses; its first complaint is passed on.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise UnavailableError("there is no C compiler")
    library = work / f"{source.stem}.so"
    command = [
        compiler,
        "-O3",
        "-march=native",
        "-shared",
        "-fPIC",
        "-pthread",
        str(source),
        *options,
        "-o",
        str(library),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise UnavailableError(f"{source.name} does not compile: {next(iter(result.stderr.splitlines()), '')}")
    return library


class Memory:
    """Buffers that no cache can hold, to be read and copied by as many threads as the engines have."""

    def __init__(self, work: Path, threads: int, cache_bytes: int) -> None:
        self._library = ctypes.CDLL(str(compile_c(Path(__file__).with_name("memory.c"), work)))
        self._library.memory_new.restype = ctypes.c_void_p
        self._library.memory_new.argtypes = [ctypes.c_size_t, ctypes.c_int]
        self._library.memory_pass.restype = ctypes.c_double
        self._library.memory_pass.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.threads = threads
        self.cache_bytes = cache_bytes
        self.bytes = 4 * cache_bytes
        self._buffers = [self.new(self.bytes, huge=huge) for huge in (False, True)]

    def new(self, size: int, *, huge: bool = False) -> int:
        """Return the address of ``size`` bytes that this process keeps.

        Raises:
            MemoryError: the system has no more.
        """
        address = self._library.memory_new(size, huge)
        if not address:
            raise MemoryError(f"no room for {size} bytes")
        return int(address)

    def read_bandwidth(self) -> float:
        """Return the bytes that all threads read in a second: the more of ordinary and huge pages."""
        return max(self.bytes / self.seconds(None, buffer, self.bytes) for buffer in self._buffers)

    def seconds(self, target: int | None, source: int, size: int) -> float:
        """Return how long it takes to read ``source``, or to copy it to ``target``.

        Raises:
            RuntimeError: the system starts no more threads.
        """
        seconds = float(self._library.memory_pass(target, source, size, self.threads))
        if seconds <= 0:
            raise RuntimeError(f"{self.threads} threads cannot be started")
        return seconds
