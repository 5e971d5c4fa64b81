"""The benchmark of operators: its report, and that an engine that computes something else cannot take part."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tools.bench import ops as bench_ops
from tools.bench.parts import onnxruntime_engines
from tools.bench.parts.engine import check
from tools.bench.parts.machine import Memory
from tools.bench.parts.problem import Case, Problem, Settings, Weights
from tools.bench.parts.unavailable import UnavailableError

pytestmark = [
    pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="the probe of the memory is written for Linux"),
]


@pytest.fixture
def problem(make_memory: Callable[[int], Memory], tmp_path: Path) -> Problem:
    settings = Settings(make_memory(1 << 18), tmp_path)
    return Problem(Case("product", 2, 64, 48, 32), Weights(64, 48), settings)


def test_the_report_has_every_engine_that_is_there_and_the_reason_of_every_other(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(bench_ops.main)
    report = tmp_path / "ops.json"
    engines = "onnxruntime-float,onnxruntime-matmulnbits-4-*,copy,llama.cpp-q4_0"
    shapes = ["--rows", "1,3", "--shapes", "64x128", "--transforms", "16", "--group", "32", "--cache", "0.1"]
    options = ["--engines", engines, *shapes, "--rounds", "2", "--threads", "1", "--json", str(report)]
    result = CliRunner().invoke(app, options, env={"GRAPHOPT_BENCH_GGML": None})
    assert result.exit_code == 0, result.output
    results = json.loads(report.read_text())
    products = [row for row in results["rows"] if row["case"]["kind"] == "product"]
    assert {(row["case"]["rows"], row["engine"]) for row in products} == {
        (rows, engine) for rows in (1, 3) for engine in ("onnxruntime-float", "onnxruntime-matmulnbits-4-g32")
    }
    assert all(row["median_us"] > 0 and row["percent_of_bandwidth"] > 0 for row in results["rows"])
    assert products[0]["bytes"] == 4 * (64 * 128 + 64 + 128)
    assert set(results["absent"]) == {"onnxruntime-matmulnbits-4-g128", "llama.cpp-q4_0"}


def test_an_engine_that_computes_something_else_is_not_timed(problem: Problem) -> None:
    engine = next(engine for engine in onnxruntime_engines.engines() if engine.name == "onnxruntime-matmulnbits-4-g32")
    preparation = engine.prepare(problem)
    assert 0 < check(engine, preparation, problem) < engine.tolerance
    with pytest.raises(UnavailableError, match="wrong: copy 0"):
        check(engine, replace(preparation, reference=preparation.reference * 1.1), problem)
    first, *other_outputs = preparation.outputs()
    not_numbers = [np.full_like(y, np.nan) for y in other_outputs]
    with pytest.raises(UnavailableError, match="wrong: copy 1"):
        check(engine, replace(preparation, outputs=lambda: [first, *not_numbers]), problem)
