"""Options that benchmarks have in common, and the contest that they ask for."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from tools.bench.parts.comparisons import Against
from tools.bench.parts.contest import Contest, choose
from tools.bench.parts.engine import AnyEngine, P
from tools.bench.parts.machine import Memory, last_level_cache
from tools.bench.parts.problem import Settings

Engines = Annotated[str, typer.Option(help="names, with * for anything; without it, those that are on by default")]
Rounds = Annotated[int, typer.Option(min=1)]
Threads = Annotated[int, typer.Option(min=1, help="of each engine")]
Cache = Annotated[float, typer.Option(help="MiB of cache that the data must exceed; 0 for the last-level cache")]
Ggml = Annotated[Path | None, typer.Option(envvar="GRAPHOPT_BENCH_GGML", help="llama.cpp's build folder")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="write the rows here too")]
Plot = Annotated[Path | None, typer.Option(help="draw the rows on this HTML page")]

_UNITS = {"k": 1 << 10, "M": 1 << 20}


@contextlib.contextmanager
def contest(
    against: Against,
    candidates: Callable[[], Sequence[AnyEngine[P]]],
    engines: str,
    *,
    rounds: int,
    threads: int,
    cache: float,
    ggml: Path | None,
) -> Iterator[tuple[Contest, Settings, list[AnyEngine[P]]]]:
    """Begin a contest of the engines that ``engines`` names; yield it, what engines share, and the engines.

    Args:
        against: the peers of each engine.
        candidates: gives all engines there are.
        engines: patterns of names; empty for those that take part by default.
        rounds: of each problem.
        threads: of each engine.
        cache: MiB, 0 for the last-level cache.
        ggml: llama.cpp's build folder.

    Raises:
        typer.BadParameter: a pattern matches no engine.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)  # torch reads it when it is imported
    selection = choose(engines, candidates())
    with tempfile.TemporaryDirectory(prefix="graphopt-bench-") as work:
        memory = Memory(Path(work), threads, round(cache * (1 << 20)) or last_level_cache())
        yield Contest(memory, rounds, against), Settings(memory, Path(work), ggml), selection


def token_counts(text: str) -> list[int]:
    """Return the numbers of tokens in a list such as ``"4096,16k,1M"``; see :func:`token_count`."""
    return [token_count(part) for part in filter(None, text.split(","))]


def token_count(text: str) -> int:
    """Return the number that a text such as 16k means.

    Raises:
        typer.BadParameter: it is not a number.
    """
    digits, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    if not digits.isdecimal():
        raise typer.BadParameter(f"{text!r} is not a number of tokens, such as 4096, 16k or 1M")
    return int(digits) * unit


def is_selected(name: str, only: Sequence[str] | None) -> bool:
    """Return whether a pattern of ``only`` matches a method's name; without patterns all are selected."""
    return not only or any(fnmatch.fnmatch(name, pattern) for pattern in only)
