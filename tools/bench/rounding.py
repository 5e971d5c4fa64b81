"""Time rounding by GPTQ, beside the factorization and products that it consists of.

    python tools/bench/rounding.py gptq                  # a layer, beside its Cholesky factorization and products
    python tools/bench/rounding.py wide --rows 8192      # a Hessian factored whole, and in panels as wide ones are
    python tools/bench/rounding.py integers              # products and sums of integers of 11 bits, beside floats
    python tools/bench/rounding.py calibration FOLDER    # statistics of a model, beside a prefill of the same text

Times of ``gptq``, ``wide`` and ``integers`` are processor time on one core, those of ``calibration`` seconds on all
cores, and of processors: onnxruntime's threads choose their cores themselves. Each part of it, and of ``wide``, runs in
a process of its own, whose peak of resident memory the system reports; it counts pages of mapped files too.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated
from unittest import mock

import numpy as np
import numpy.typing as npt
import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.analysis.structure.products import linear_nodes, lm_head_nodes
from graphopt.artifact import artifact
from graphopt.artifact.tokens import texts_of
from graphopt.compile.calibration.inputs import collect
from graphopt.graph.weights import weight_of
from graphopt.numerics.formats import format_of
from graphopt.ort.session import open_session, run
from graphopt.passes.recipe import load_recipe
from graphopt.quantization.rounding import factors
from graphopt.quantization.rounding.methods.gptq import GPTQ
from graphopt.quantization.rounding.single_thread import one_thread
from graphopt.quantization.statistics.integers import Matrix, add_products, integers_of, multiply
from graphopt.quantization.statistics.options import CalibrationOptions
from graphopt.tasks import task_of

# Rows that GPTQ corrects by one product.
_BLOCK = 128

app = typer.Typer(help=__doc__)


def seconds_of(call: Callable[[], object], rounds: int = 1) -> float:
    """Return the least processor time of a call."""
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return min(times)


def products(upper: npt.NDArray[np.float64], errors: npt.NDArray[np.float64]) -> None:
    """Compute the corrections of each block of rows by those before it: the products of GPTQ, and nothing else."""
    for begin in range(_BLOCK, len(upper), _BLOCK):
        upper[:begin, begin : begin + _BLOCK].T @ errors[:begin]


@app.command("gptq")
def gptq(
    rows: int = 4096,
    columns: int = 4096,
    formats: Annotated[list[str] | None, typer.Option("--format", help="formats of weights")] = None,
    group: int = 64,
    rounds: Annotated[int, typer.Option(help="runs, the least time of which counts")] = 1,
) -> None:
    """Round one layer of random weights, for inputs that are correlated."""
    random = np.random.default_rng(0)
    inputs = random.standard_normal((2 * rows, rows), np.float32)
    inputs += inputs @ (random.standard_normal((rows, rows), np.float32) / np.float32(rows) ** 0.5)
    hessian = inputs.T @ inputs / np.float32(len(inputs))
    weight = random.standard_normal((rows, columns), np.float32)
    damped_hessian = hessian.astype(np.float64) + 0.01 * np.diagonal(hessian).mean() * np.eye(rows)
    with one_thread():
        factor = np.linalg.cholesky(damped_hessian)
        errors = weight.astype(np.float64)
        cholesky = seconds_of(lambda: np.linalg.cholesky(damped_hessian), rounds)
        lower_bound = cholesky + seconds_of(lambda: products(factor, errors), rounds)
    print(f"{rows} x {columns}, groups of {group}; Cholesky {cholesky:.2f} s, with the products {lower_bound:.2f} s")
    print("| format | GPTQ, s | of Cholesky and products |\n| --- | --- | --- |", flush=True)
    for name in formats or ["int4", "uint4", "nl4", "nf4", "int3", "fp6_e2m3"]:
        table = format_of(name)
        seconds = seconds_of(
            lambda table=table: GPTQ().round(  # type: ignore[misc]
                weight, table, group, "least_squares", scale_type=np.float16, statistics=hessian
            ),
            rounds,
        )
        print(f"| `{name}` | {seconds:.2f} | {seconds / lower_bound:.2f} |", flush=True)


def low_rank_hessian(rows: int, tokens: int) -> npt.NDArray[np.float32]:
    """Return X^T X / tokens of random inputs [tokens, rows] whose channels differ in size, float32 [rows, rows]."""
    random = np.random.default_rng(0)
    inputs = random.standard_normal((tokens, rows), np.float32) * np.exp(random.standard_normal(rows, np.float32) / 2)
    hessian = np.asarray(inputs.T @ inputs)
    hessian /= np.float32(tokens)
    return hessian


@app.command("wide")
def wide(
    rows: int = 8192,
    columns: int = 256,
    tokens: int = 1024,
    name: Annotated[str, typer.Option("--format", help="format of weights")] = "t4",
    kinds: Annotated[str, typer.Option("--only", help="whole, panels, or both: a whole factor takes much memory")] = "",
) -> None:
    """Round some columns of a matrix with many rows, by a factor of its Hessian whole and in panels."""
    hessian, codes = low_rank_hessian(rows, tokens), dict[str, npt.NDArray[np.float64]]()
    print(f"{rows} x {columns}, {name}, {tokens} tokens")
    print("| factor | GPTQ, s | peak memory, MB | loss |\n| --- | --- | --- | --- |", flush=True)
    weight = np.random.default_rng(1).standard_normal((rows, columns), np.float32)
    for kind in kinds.split(",") if kinds else ("whole", "panels"):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "values.npy"
            command = [sys.executable, __file__, "wide-part", kind, *map(str, (rows, columns, tokens)), name, str(file)]
            costs = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            codes[kind] = np.load(file)
        error = weight - codes[kind]
        loss = float(np.sum(error * (hessian @ error.astype(np.float32))) / np.sum(weight * (hessian @ weight)))
        print(f"| {kind} | {costs['seconds']:.1f} | {costs['peak'] / 1e6:.0f} | {loss:.6f} |", flush=True)
    if len(codes) > 1:
        print(f"\n{np.mean(codes['whole'] != codes['panels']):.4%} of the weights differ")


@app.command("integers")
def integers(
    rows: int = 576,
    columns: int = 1536,
    tokens: int = 1024,
    rounds: Annotated[int, typer.Option(help="runs, the least time of which counts")] = 20,
) -> None:
    """Multiply inputs [tokens, rows] by a matrix [rows, columns], and sum up their products, as a calibration does."""
    random = np.random.default_rng(0)
    x = random.standard_normal((tokens, rows), np.float32)
    matrix = Matrix(random.standard_normal((rows, columns), np.float32))
    second, sums, product = x + 1, np.zeros((rows, rows)), x @ matrix.numbers

    def add() -> None:
        vectors = integers_of(x, 0)
        add_products(vectors, vectors, sums)

    with one_thread(), mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        error = float(np.linalg.norm(multiply(x, [matrix])[0] - product) / np.linalg.norm(product))
        cases: list[tuple[str, int, Callable[[], object]]] = [
            ("a product of floats", columns, lambda: np.matmul(x, matrix.numbers, out=product)),
            ("a product of integers", columns, lambda: multiply(x, [matrix])),
            ("sums of floats", rows, lambda: x.T @ second),
            ("sums of integers", rows, add),
        ]
        for name, width, call in cases:
            seconds = seconds_of(call, rounds)
            print(f"{name}: {1e3 * seconds:.2f} ms, {2e-9 * tokens * rows * width / seconds:.0f} GFLOP/s")
        for name, axis in (("tokens as integers", 1), ("columns as integers", 0)):
            seconds = seconds_of(lambda axis=axis: integers_of(x, axis), rounds)  # type: ignore[misc]
            print(f"{name}: {1e3 * seconds:.2f} ms, {1e9 * seconds / x.size:.2f} ns a number")
    print(f"error of the product: {error:.5f}")


@app.command("wide-part", hidden=True)
def wide_part(kind: str, rows: int, columns: int, tokens: int, name: str, file: Path) -> None:
    """Do one row of ``wide``, and print its seconds and peak memory."""
    factors.WIDE = rows if kind == "whole" else 0
    hessian = low_rank_hessian(rows, tokens)
    weight = np.random.default_rng(1).standard_normal((rows, columns), np.float32)
    begin = time.process_time()
    matrix_codes = GPTQ().round(
        weight, format_of(name), rows, "least_squares", scale_type=np.float16, statistics=hessian
    )
    seconds = time.process_time() - begin
    np.save(file, matrix_codes.dequantize())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak": peak}))


@app.command("calibration")
def calibration(
    model: Annotated[Path, typer.Argument(help="an exported folder, in floating point")],
    recipe: Annotated[str, typer.Option("-r", "--recipe", help="whose statistics are collected")] = "int4",
    windows: Annotated[int, typer.Option(help="windows of text")] = 4,
    window: Annotated[int, typer.Option(help="tokens of a window")] = 1024,
    output: Annotated[Path, typer.Option("-o", "--output", help="where statistics go")] = Path("statistics"),
) -> None:
    """Collect the statistics of a model, beside a prefill of the same text by the model as it is."""
    graph = artifact.read(model).model.graph
    nodes = [node for node in linear_nodes(graph) if node not in lm_head_nodes(graph)]
    shapes = [
        weight.const_value.shape.numpy() for node in nodes if (weight := weight_of(node, 1)) and weight.const_value
    ]
    inputs = {node.inputs[0]: shape[0] for node, shape in zip(nodes, shapes, strict=True)}
    layers = max(1, sum(node.op_type == "Attention" for node in graph))
    weights, sums = sum(4 * a * b for a, b in shapes) / layers, sum(8 * rows**2 for rows in inputs.values()) / layers
    print(f"{windows} x {window} tokens; a layer: {weights / 1e6:.0f} MB of weights, {sums / 1e6:.0f} MB of sums")
    print("| part | seconds | of the prefill | of processors | of the prefill | peak memory, MB |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    costs: dict[str, dict[str, float]] = {}
    for part in ("opening", "prefill", "collecting"):
        command = [sys.executable, __file__, "part", part, str(model), recipe, str(windows), str(window), str(output)]
        cost = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        costs[part] = cost
        cells = []
        for kind in ("seconds", "worked"):
            share = f"{cost[kind] / costs['prefill'][kind]:.2f}" if part == "collecting" else ""
            cells += [f"{cost[kind]:.2f}", share]
        print(f"| {part} | {' | '.join(cells)} | {cost['peak'] / 1e6:.0f} |", flush=True)


@app.command("part", hidden=True)
def part(name: str, model: Path, recipe: str, windows: int, window: int, output: Path) -> None:
    """Do one part of ``calibration``, and print its seconds and peak memory."""
    options = CalibrationOptions(windows=windows, window=window)
    source = artifact.read(model)
    texts = texts_of(source.companions, options, source.manifest.model.max_positions)

    def prefill() -> None:
        session = open_session(model / artifact.MODEL)
        feeds_of = task_of(source.model.graph).text_feeds
        names = {port.name for port in session.get_inputs()}
        for text in texts if name == "prefill" else []:
            feeds = feeds_of(source.model.graph, text[None])
            run(session, None, {key: value for key, value in feeds.items() if key in names})

    def collecting() -> None:
        collect(source, load_recipe(recipe).model_copy(update={"calibration": options}), output)

    begin, processor = time.perf_counter(), time.process_time()
    (collecting if name == "collecting" else prefill)()
    seconds, processor = time.perf_counter() - begin, time.process_time() - processor
    print(
        json.dumps(
            {"seconds": seconds, "worked": processor, "peak": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
        )
    )


if __name__ == "__main__":
    app()
