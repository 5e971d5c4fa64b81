"""Time graphopt's operators and their peers, side by side in one process.

    python tools/bench/ops.py                                     # every engine that is installed; minutes
    python tools/bench/ops.py --rows 1 --shapes 4096x4096 --engines 'graphopt-int4,*-4-*,llama.cpp-q4*'
    python tools/bench/ops.py --json ops.json --plot ops.html

`pip install ".[bench]"` brings the peers that pip has. llama.cpp takes part from a build folder with shared libraries:

    cmake -S llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON -DGGML_OPENMP=OFF
    cmake --build build -j --target llama-bench llama-quantize
    python tools/bench/ops.py --ggml build                        # or GRAPHOPT_BENCH_GGML=build

Its source is on GitHub, and in `vendor/llama.cpp` of the source distribution of llama-cpp-python on PyPI
(`pip download --no-deps --no-binary :all: llama-cpp-python`). Without OpenMP its threads are its own, and the benchmark
can stop them while others are timed.

How it is measured: a call of an engine computes several copies of the product, whose weights together are four times
the last-level cache, as the layers of a model are; so the cost of a call is spread as in a model. All engines run in
every round, in a new random order, and between any two of them the memory's read bandwidth is measured with as many
threads. No engine's threads spin beside another's. The time includes rounding activations. An engine whose output is
farther from float64 with the same weights than rounding the activations explains is listed as wrong and not timed;
"error" is that distance.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from tools.bench.parts import (
    ggml_engines,
    graphopt_engines,
    onnxruntime_engines,
    openvino_engines,
    torch_engines,
    transform_engines,
)
from tools.bench.parts.comparisons import PRODUCTS
from tools.bench.parts.engine import Engine
from tools.bench.parts.options import Cache, Engines, Ggml, JsonFile, Plot, Rounds, Threads, contest
from tools.bench.parts.problem import LANES, Case, Problem, Settings, Weights

_MODULES = (
    graphopt_engines,
    onnxruntime_engines,
    torch_engines,
    openvino_engines,
    ggml_engines,
    transform_engines,
)


def main(
    rows: Annotated[str, typer.Option(help="rows of x, the tokens of a call")] = "1,8,256",
    shapes: Annotated[str, typer.Option(help="inner x outer sizes of the weights")] = "4096x4096,4096x11008",
    transforms: Annotated[str, typer.Option(help="orders of Hadamard; empty for none")] = "4096,18944",
    group: Annotated[int, typer.Option(help="weights that share a scale, where an engine can choose")] = 128,
    engines: Engines = "",
    rounds: Rounds = 15,
    threads: Threads = 2,
    cache: Cache = 0,
    ggml: Ggml = None,
    json_file: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Compare every engine with float64, time those that are right, print medians and ratios."""
    contest_context = contest(PRODUCTS, _engines, engines, rounds=rounds, threads=threads, cache=cache, ggml=ggml)
    with contest_context as (bench, settings, contestants):
        for problem in _problems(settings, rows, shapes, transforms, group):
            bench.run(problem, [engine for engine in contestants if engine.kind == problem.case.kind])
    bench.close(json_file, plot)


def _engines() -> list[Engine]:
    return [engine for module in _MODULES for engine in module.engines()]


def _problems(settings: Settings, rows: str, shapes: str, transforms: str, group: int) -> Iterator[Problem]:
    """Yield the products, for each shape all rows, so that weights are rounded once; then the transforms."""
    for shape in filter(None, shapes.split(",")):
        inner, outer = map(int, shape.split("x"))
        if inner % group or group % LANES or outer % LANES:
            raise typer.BadParameter(f"{shape} in groups of {group}: whole groups and multiples of {LANES}, please")
        weights = Weights(inner, outer)
        for count in map(int, filter(None, rows.split(","))):
            yield Problem(Case("product", count, inner, outer, group), weights, settings)
    for order in map(int, filter(None, transforms.split(","))):
        # One tensor of twice the cache, and as much for the result.
        count = max(1, 2 * settings.memory.cache_bytes // (4 * order))
        yield Problem(Case("transform", count, order, order, order), Weights(order, order), settings)


if __name__ == "__main__":
    typer.run(main)
