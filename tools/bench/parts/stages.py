"""The cost of a long run stage by stage: time, processor time, memory, disk."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from graphopt.util.progress import Progress

# Seconds between two looks at the disk.
_PERIOD = 0.5


@dataclass
class Cost:
    """The cost of one stage.

    Attributes:
        seconds: of wall time.
        worked: seconds of processor time of all threads of this process.
        memory: the most bytes that were resident, pages of mapped files included.
        disk: the most bytes that the folder took.
    """

    seconds: float = 0.0
    worked: float = 0.0
    memory: int = 0
    disk: int = 0

    def add(self, part: Cost) -> None:
        """Add a part of the same stage."""
        self.seconds += part.seconds
        self.worked += part.worked
        self.memory, self.disk = max(self.memory, part.memory), max(self.disk, part.disk)

    as_dict = asdict


class Stages:
    """Costs of stages, by name in the order in which they began.

    Args:
        folder: whose disk is watched.
        on_cost: called with each stage, or part of one, when it ends.

    Attributes:
        costs: of each stage, its parts together.
        parts: of each part of a stage that has some, by its name.
        progress: the stage that runs, and how far it is.
    """

    def __init__(self, folder: Path, on_cost: Callable[[str, Cost], None] | None = None) -> None:
        self.costs: dict[str, Cost] = {}
        self.parts: dict[str, Cost] = {}
        self.progress = ""
        self._folder, self._name, self._stop = folder, "", threading.Event()
        self._largest, self._on_cost = 0, on_cost

    def progress_of(self, command: str) -> Progress:
        """Return the receiver of a command's progress."""

        def take(stage: str, count: int = 0, total: int | None = None) -> None:
            self.begin(f"{command}: {stage}")
            self.progress = f"{command}: {stage}" + (f", {count} of {total}" if total else "")

        return take

    def begin(self, stage: str) -> None:
        """Begin a stage, or the next part of it, and end the one before."""
        self.progress = stage
        if stage != self._name:
            self._close()
            self._name = stage

    @contextlib.contextmanager
    def watch(self) -> Iterator[Stages]:
        """Watch until the block ends."""
        thread = threading.Thread(target=self._watch_disk, daemon=True)
        thread.start()
        self._reset()
        try:
            yield self
        finally:
            self._close()
            self._stop.set()
            thread.join()

    def _close(self) -> None:
        if self._name:
            memory, disk = _most_resident(), max(self._largest, _bytes_in(self._folder))
            processor, seconds = time.process_time() - self._processor_begin, time.perf_counter() - self._clock
            stage, cost = re.sub(r", part \d+ of \d+", "", self._name), Cost(seconds, processor, memory, disk)
            self.costs.setdefault(stage, Cost()).add(cost)
            if stage != self._name:
                self.parts.setdefault(self._name, Cost()).add(cost)
            if self._on_cost is not None:
                self._on_cost(self._name, cost)
        self._name = ""
        self._reset()

    def _reset(self) -> None:
        # https://docs.kernel.org/filesystems/proc.html: 5 sets the peak to what is resident now
        Path("/proc/self/clear_refs").write_text("5")
        self._largest, self._clock, self._processor_begin = 0, time.perf_counter(), time.process_time()

    def _watch_disk(self) -> None:
        while not self._stop.wait(_PERIOD):
            self._largest = max(self._largest, _bytes_in(self._folder))


def _most_resident() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


def _bytes_in(folder: Path) -> int:
    """Return what the files of a folder take on the disk; one that vanishes meanwhile counts nothing."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += 512 * file.lstat().st_blocks
    return total
