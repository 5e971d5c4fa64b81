"""What a benchmark does with its problems: prepare and check engines, time those that are right, report them."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tools.bench.parts.comparisons import Against, Comparison, compare
from tools.bench.parts.engine import AnyEngine, P, Workload, check
from tools.bench.parts.machine import Memory, OtherLoad, describe, quiet
from tools.bench.parts.report import Curve, Row, comparison_table, curve_table, table, write_json, write_plot
from tools.bench.parts.rounds import measure
from tools.bench.parts.unavailable import UnavailableError


class Contest:
    """Engines side by side, problem after problem.

    Attributes:
        memory: whose bandwidth is measured between engines.
        rounds: of each problem.
        against: the peers of each engine.
        rows: the results so far.
        comparisons: the ratios so far.
        absent: engines that did not take part somewhere, and why.
    """

    def __init__(self, memory: Memory, rounds: int, against: Against) -> None:
        """Print what the machine is."""
        self.memory, self.rounds, self.against = memory, rounds, against
        self.rows: list[Row] = []
        self.comparisons: list[Comparison] = []
        self.absent: dict[str, str] = {}
        self._bandwidths: list[float] = []
        self._shares: list[float] = []
        console = Console()
        self._console = console if console.is_terminal else Console(width=120)
        self._machine = describe()
        self._console.print(f"{self._machine}; {memory.threads} threads, {rounds} rounds", highlight=False)

    def run(self, problem: P, engines: Sequence[AnyEngine[P]]) -> list[Row]:
        """Compare the engines with float64, time those that are right, print and return medians and ratios."""
        ready, errors = self._prepare(problem, engines)
        if not ready:
            return []
        load = OtherLoad()
        with self._bar(str(problem.case)) as advance:
            result = measure(ready, self.memory, self.rounds, advance)
        self._shares.append(load.share())
        self._bandwidths += result.bandwidths
        rows = [
            Row(
                case=problem.case,
                engine=name,
                median_us=1e6 * timing.median,
                lowest_us=1e6 * min(timing.seconds),
                highest_us=1e6 * max(timing.seconds),
                bytes=ready[name].bytes,
                percent_of_bandwidth=100 * statistics.median(timing.shares),
                error=errors[name],
            )
            for name, timing in result.timings.items()
        ]
        self._console.print(table(problem.case, rows, statistics.median(result.bandwidths)))
        self._console.print(quiet(self._shares[-1]), highlight=False)
        ratios = list(compare(problem.case, result.timings, self.against))
        if ratios:
            self._console.print(comparison_table(ratios))
        self.rows += rows
        self.comparisons += ratios
        return rows

    def close(self, json_file: Path | None, plot: Path | None, curves: Sequence[Curve] = ()) -> None:
        """Print curves and absent engines, and write the results to the files that are named.

        Raises:
            UnavailableError: a plot is requested, and plotly is not installed.
        """
        if curves:
            self._console.print(curve_table("microseconds of a step", curves))
        for name, reason in self.absent.items():
            self._console.print(f"absent: {name}: {reason}", highlight=False, markup=False)
        if json_file is not None:
            facts = {
                "threads": self.memory.threads,
                "rounds": self.rounds,
                "others": max(self._shares, default=0.0),
                "bandwidth": _spread(self._bandwidths),
                "absent": self.absent,
                "curves": [asdict(curve) for curve in curves],
            }
            write_json(json_file, self._machine, self.rows, self.comparisons, facts)
        if plot is not None:
            write_plot(plot, self._machine, self.rows, curves)

    def _prepare(self, problem: P, engines: Sequence[AnyEngine[P]]) -> tuple[dict[str, Workload], dict[str, float]]:
        """Return the engines that can take part and are right, with their errors; note the others in ``absent``."""
        ready: dict[str, Workload] = {}
        errors: dict[str, float] = {}
        for engine in engines:
            try:
                workload = engine.prepare(problem)
                errors[engine.name] = check(engine, workload, problem)
            except UnavailableError as error:
                self.absent.setdefault(engine.name, f"{error} ({problem.case})")
            else:
                ready[engine.name] = workload
        return ready, errors

    @contextlib.contextmanager
    def _bar(self, name: str) -> Iterator[Callable[[], object]]:
        """Show a bar of rounds, and yield what moves it; no thread redraws it while engines are timed."""
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            auto_refresh=False,
        ) as progress:
            task = progress.add_task(name, total=self.rounds)

            def advance() -> None:
                progress.advance(task)
                progress.refresh()

            yield advance


def choose(patterns: str, candidates: Sequence[AnyEngine[P]]) -> list[AnyEngine[P]]:
    """Return the engines whose names match one of the patterns, or the default ones.

    Raises:
        typer.BadParameter: a pattern matches none.
    """
    if not patterns:
        return [engine for engine in candidates if engine.default]
    names = patterns.split(",")
    for pattern in names:
        if not any(fnmatch(engine.name, pattern) for engine in candidates):
            raise typer.BadParameter(
                f"no engine is called {pattern}; there are {', '.join(e.name for e in candidates)}"
            )
    return [engine for engine in candidates if any(fnmatch(engine.name, pattern) for pattern in names)]


def _spread(bandwidths: list[float]) -> dict[str, float]:
    """Return the lowest, median and highest bandwidth in GB/s."""
    if not bandwidths:
        return {}
    values = {"lowest": min(bandwidths), "median": statistics.median(bandwidths), "highest": max(bandwidths)}
    return {name: value / 1e9 for name, value in values.items()}
