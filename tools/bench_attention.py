"""Time graphopt's attention over a cache and what others have for the same, side by side in one process.

    python tools/bench_attention.py                                   # every engine that is installed; minutes
    python tools/bench_attention.py --past 64k --engines 'graphopt-int8*,onnxruntime-gqa-int8,llama.cpp-q8_0'
    python tools/bench_attention.py --past '' --curve                 # graphopt alone, from 4k to 1M tokens
    python tools/bench_attention.py --json attention.json --plot attention.html

`pip install ".[export]"` brings torch; llama.cpp takes part as in `bench_ops.py`, if it is named. The rules are the
same: interleaved rounds, in an order drawn anew, with the memory's read bandwidth measured between any two engines, and
no threads that spin beside another's.

What is timed is one step of one layer for one sequence: the new tokens go into the cache, and their queries read it.
The tokens are the last of `--past`, and each step writes the same ones again, so that all steps are equal. A call of an
engine goes through several caches that hold the same, so that what a step reads is, over the call, four times the
last-level cache, as it is over the layers of a model. Keys and values are random; some channels of keys are large, as
in models, and the softmax weighs about one token in 500. What retrieval costs does not depend on the numbers; what it
is worth cannot be seen on random ones.

`graphopt-STORAGE` reads everything. `-streaming` reads the first 4 and the last 4096 tokens. `-bounds` and `-mean` read
`--budget` tokens in the pages that a summary promises most of, besides the first 4 and as many of the last as a page
has.

An engine whose y is farther from float64 attention than its rounding explains is listed as wrong and not timed. Float64
attention is over the cache as the engine holds it, rounded; where pages are retrieved, over those that had to be.
"error" is that distance by the norm of y. It is not what rounding the cache costs. "MB" is what a step must read: all
tokens, or the pages that were chosen in whole and all summaries, and scales; each once, though some read it once for
each query head.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[1]))
from graphopt.runtime_ops.kv_attention.attributes import PAGES, RETRIEVAL
from tools.bench import attention_ggml, attention_graphopt, attention_onnxruntime, attention_torch
from tools.bench.attention_graphopt import Choice
from tools.bench.attention_problem import AttentionCase, AttentionProblem, Sequence
from tools.bench.comparisons import ATTENTION
from tools.bench.contest import Contest, choose
from tools.bench.machine import Memory, last_level_cache
from tools.bench.problem import Settings
from tools.bench.report import Curve

_MODULES = (attention_graphopt, attention_onnxruntime, attention_torch, attention_ggml)
_UNITS = {"k": 1 << 10, "M": 1 << 20}
_CURVE = "graphopt-int8"


def main(
    past: Annotated[str, typer.Option(help="tokens that the last query sees; empty for none")] = "16k,64k,128k",
    tokens: Annotated[int, typer.Option(min=1, help="new tokens of a step, the last of them")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="query heads")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1)] = 8,
    size: Annotated[int, typer.Option(min=16, help="of a head")] = 128,
    budget: Annotated[str, typer.Option(help="tokens that are retrieved")] = "4k",
    page: Annotated[int, typer.Option(help="tokens of a page")] = 64,
    curve: Annotated[bool, typer.Option(help="also int8 by tokens and budgets")] = False,
    curve_past: Annotated[str, typer.Option(help="tokens along the curve")] = "4k,16k,64k,256k,1M",
    curve_budgets: Annotated[str, typer.Option(help="a curve for each")] = "1k,2k,4k,8k,16k",
    engines: Annotated[str, typer.Option(help="names, with * for anything; what is named may be off by default")] = "",
    rounds: Annotated[int, typer.Option(min=1)] = 15,
    threads: Annotated[int, typer.Option(min=1, help="of each engine")] = 2,
    cache: Annotated[float, typer.Option(help="MiB that caches must exceed; 0 asks for the last-level cache")] = 0,
    ggml: Annotated[Path | None, typer.Option(envvar="GRAPHOPT_BENCH_GGML", help="llama.cpp's build folder")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here too")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw the rows on this HTML page")] = None,
) -> None:
    """Compare every engine with float64, time those that are right, print medians and ratios."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # torch reads it when it is imported
    if heads % kv_heads or size % 16 or page not in PAGES:
        raise typer.BadParameter(
            f"{heads} heads for {kv_heads} KV heads of {size}, pages of {page}: whole groups, heads of a multiple of "
            f"16, and pages of {', '.join(map(str, PAGES))} tokens, please"
        )
    cases = [AttentionCase(count, tokens, heads, kv_heads, size, page, _number(budget)) for count in _numbers(past)]
    points = [AttentionCase(count, 1, heads, kv_heads, size, page, 0, "curve") for count in _numbers(curve_past)]
    if too_short := [case.context for case in (*cases, *points) if case.context <= case.tokens]:
        raise typer.BadParameter(f"{too_short[0]} tokens leave no past before the {tokens} new ones")
    chosen = choose(engines, [engine for module in _MODULES for engine in module.engines()])
    with tempfile.TemporaryDirectory(prefix="graphopt-bench-") as work:
        memory = Memory(Path(work), threads, round(cache * (1 << 20)) or last_level_cache())
        contest = Contest(memory, rounds, ATTENTION)
        settings = Settings(memory, Path(work), ggml)
        sequence = Sequence(kv_heads, size)
        for case in cases:
            contest.run(AttentionProblem(case, sequence, settings), chosen)
        curves: dict[str, Curve] = {}
        for case in points if curve else []:
            _point(contest, AttentionProblem(case, sequence, settings), _numbers(curve_budgets), curves)
    contest.close(json_file, plot, list(curves.values()))


def _point(contest: Contest, problem: AttentionProblem, budgets: list[int], curves: dict[str, Curve]) -> None:
    """Time a point of each curve: dense attention, and retrieval with the budgets that are less than that."""
    context = problem.case.context
    choices = {_CURVE: Choice("int8")}
    for budget in budgets:
        if budget < context:
            choices[f"{_CURVE}-bounds-{budget}"] = Choice("int8", RETRIEVAL, budget=budget)
    rows = contest.run(problem, [attention_graphopt.engine(name, choice) for name, choice in choices.items()])
    for row in sorted(rows, key=lambda row: list(choices).index(row.engine)):
        budgeted = row.engine.removeprefix(f"{_CURVE}-bounds-")
        name = "dense" if row.engine == _CURVE else f"budget {budgeted}"
        of_engine = curves.setdefault(name, Curve(name, [], []))
        of_engine.x.append(context)
        of_engine.median_us.append(row.median_us)


def _numbers(text: str) -> list[int]:
    return [_number(part) for part in filter(None, text.split(","))]


def _number(text: str) -> int:
    """Return what, say, 16k means.

    Raises:
        typer.BadParameter: it is no number.
    """
    digits, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    if not digits.isdecimal():
        raise typer.BadParameter(f"{text!r} is no number of tokens, such as 4096, 16k or 1M")
    return int(digits) * unit


if __name__ == "__main__":
    typer.run(main)
