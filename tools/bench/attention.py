"""Time graphopt's attention over a cache and its peers', side by side in one process.

    python tools/bench/attention.py                                   # every engine that is installed; minutes
    python tools/bench/attention.py --past 64k --engines 'graphopt-int8*,onnxruntime-gqa-int8,llama.cpp-q8_0'
    python tools/bench/attention.py --past '' --curve                 # graphopt alone, from 4k to 1M tokens
    python tools/bench/attention.py --json attention.json --plot attention.html

`pip install ".[export]"` brings torch; llama.cpp takes part as in `tools/bench/ops.py`, if named. The rules are the
same: interleaved rounds in new random orders, with the memory's read bandwidth measured between any two engines, and
no threads that spin beside another's.

What is timed is one step of one layer for one sequence: the new tokens go into the cache, and their queries read it.
The tokens are the last of `--past`, and each step writes the same ones again, so that all steps are equal. A call of an
engine goes through several equal caches, together four times the last-level cache, as the layers of a model are. Keys
and values are random; some channels of keys are large, as in models, and the softmax weighs about one token in 500.
The cost of retrieval does not depend on the numbers; its quality cannot be seen on random ones.

`graphopt-STORAGE` reads everything. `-streaming` reads the first 4 and the last 4096 tokens. `-bounds` and `-mean` read
`--budget` tokens in the pages with the best scores by a summary, besides the first 4 and one page's worth of the last.

An engine whose y is farther from float64 attention than its rounding explains is listed as wrong and not timed. The
float64 attention is over the rounded cache that the engine holds; where pages are retrieved, over the right ones.
"error" is that distance, relative to the norm of y; it does not contain the error of rounding the cache. "MB" is what a
step must read: all tokens, or whole retrieved pages and all summaries, with scales. Each byte counts once, though some
engines read it once for each query head.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.runtime_ops.kv_attention.spec.attributes import PAGES, RETRIEVAL
from tools.bench.parts import attention_ggml, attention_graphopt, attention_onnxruntime, attention_torch
from tools.bench.parts.attention_graphopt import Choice
from tools.bench.parts.attention_problem import AttentionCase, AttentionProblem, Sequence
from tools.bench.parts.comparisons import ATTENTION
from tools.bench.parts.contest import Contest
from tools.bench.parts.engine import AnyEngine
from tools.bench.parts.options import (
    Cache,
    Engines,
    Ggml,
    JsonFile,
    Plot,
    Rounds,
    Threads,
    contest,
    token_count,
    token_counts,
)
from tools.bench.parts.report import Curve

_MODULES = (attention_graphopt, attention_onnxruntime, attention_torch, attention_ggml)
_CURVE = "graphopt-int8"


def main(
    past: Annotated[str, typer.Option(help="tokens that the last query sees; empty for none")] = "16k,64k,128k",
    tokens: Annotated[int, typer.Option(min=1, help="new tokens of a step, the last of them")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="query heads")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1)] = 8,
    size: Annotated[int, typer.Option(min=16, help="of a head")] = 128,
    budget: Annotated[str, typer.Option(help="tokens that are retrieved")] = "4k",
    page: Annotated[int, typer.Option(help="tokens of a page")] = 64,
    curve: Annotated[bool, typer.Option(help="also time int8 along tokens, for each budget")] = False,
    curve_past: Annotated[str, typer.Option(help="tokens along the curve")] = "4k,16k,64k,256k,1M",
    curve_budgets: Annotated[str, typer.Option(help="a curve for each")] = "1k,2k,4k,8k,16k",
    engines: Engines = "",
    rounds: Rounds = 15,
    threads: Threads = 2,
    cache: Cache = 0,
    ggml: Ggml = None,
    json_file: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Compare every engine with float64, time those that are right, print medians and ratios."""
    if heads % kv_heads or size % 16 or page not in PAGES:
        raise typer.BadParameter(
            f"{heads} heads for {kv_heads} KV heads of {size}, pages of {page}: whole groups, heads of a multiple of "
            f"16, and pages of {', '.join(map(str, PAGES))} tokens, please"
        )
    cases = [
        AttentionCase(count, tokens, heads, kv_heads, size, page, token_count(budget)) for count in token_counts(past)
    ]
    points = [AttentionCase(count, 1, heads, kv_heads, size, page, 0, "curve") for count in token_counts(curve_past)]
    if too_short := [case.context for case in (*cases, *points) if case.context <= case.tokens]:
        raise typer.BadParameter(f"{too_short[0]} tokens leave no past before the {tokens} new ones")
    curves: dict[str, Curve] = {}
    contest_context = contest(ATTENTION, _engines, engines, rounds=rounds, threads=threads, cache=cache, ggml=ggml)
    with contest_context as (bench, settings, contestants):
        sequence = Sequence(kv_heads, size)
        for case in cases:
            bench.run(AttentionProblem(case, sequence, settings), contestants)
        for case in points if curve else []:
            _point(bench, AttentionProblem(case, sequence, settings), token_counts(curve_budgets), curves)
    bench.close(json_file, plot, list(curves.values()))


def _engines() -> list[AnyEngine[AttentionProblem]]:
    return [engine for module in _MODULES for engine in module.engines()]


def _point(contest: Contest, problem: AttentionProblem, budgets: list[int], curves: dict[str, Curve]) -> None:
    """Time a point of each curve: dense attention, and retrieval with the budgets that are less than that."""
    context = problem.case.context
    choices = {_CURVE: Choice("int8")}
    for budget in budgets:
        if budget < context:
            choices[f"{_CURVE}-bounds-{budget}"] = Choice("int8", RETRIEVAL, budget=budget)
    rows = contest.run(problem, [attention_graphopt.engine(name, choice) for name, choice in choices.items()])
    for row in sorted(rows, key=lambda row: list(choices).index(row.engine)):
        tokens = row.engine.removeprefix(f"{_CURVE}-bounds-")
        name = "dense" if row.engine == _CURVE else f"budget {tokens}"
        curve_of_engine = curves.setdefault(name, Curve(name, [], []))
        curve_of_engine.x.append(context)
        curve_of_engine.median_us.append(row.median_us)


if __name__ == "__main__":
    typer.run(main)
