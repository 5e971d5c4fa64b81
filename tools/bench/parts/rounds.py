"""Time engines side by side: each round times all of them in turn, and the memory's bandwidth between them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tools.bench.parts.engine import Workload
from tools.bench.parts.machine import Memory

_SECONDS = 0.015
"""Time an engine gets in a round, at least; a run of all its copies is not cut off."""


@dataclass
class Timing:
    """The rounds of one engine: seconds of one product, and the share of the bandwidth it reached."""

    seconds: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)


@dataclass
class Rounds:
    """All timings, by engine, and every bandwidth that was measured between them, in bytes per second."""

    timings: dict[str, Timing]
    bandwidths: list[float] = field(default_factory=list)


def measure(engines: Mapping[str, Workload], memory: Memory, rounds: int, advance: Callable[[], object]) -> Rounds:
    """Time all engines in each round, in a new random order, and call ``advance`` after each round.

    An engine runs once before it is timed: its threads are awake then, and other engines' data has left the caches. Its
    share of the bandwidth is relative to the memory's right before and right after it, whichever is more.
    """
    result = Rounds({name: Timing() for name in engines})
    order = list(engines)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        before = memory.read_bandwidth()
        for name in order:
            seconds = _time(engines[name])
            after = memory.read_bandwidth()
            timing = result.timings[name]
            timing.seconds.append(seconds)
            timing.shares.append(engines[name].bytes / seconds / max(before, after))
            result.bandwidths.append(after)
            before = after
        advance()
    return result


def _time(engine: Workload) -> float:
    """Return the seconds of one product."""
    engine.run()
    runs = 0
    begin = time.perf_counter()
    while (seconds := time.perf_counter() - begin) < _SECONDS:
        engine.run()
        runs += 1
    # Threads that spin a while after their work, as OpenMP's do, get the time to fall asleep.
    time.sleep(0.005)
    return seconds / (runs * engine.copies)
