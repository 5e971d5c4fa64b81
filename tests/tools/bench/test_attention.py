"""The benchmark of attention: its report, the state it writes, and that a wrong engine cannot take part."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from graphopt.runtime_ops.kv_attention.spec.attributes import (
    DENSE,
    LEVELS,
    RETRIEVAL,
    STORAGES,
    STREAMING,
    KVAttributes,
)
from graphopt.runtime_ops.kv_attention.spec.reference import reference
from graphopt.runtime_ops.kv_attention.spec.storages import STORAGE_OF
from tools.bench import attention as bench_attention
from tools.bench.parts import (
    attention_ggml,
    attention_graphopt,
    attention_onnxruntime,
    attention_state,
    attention_torch,
)
from tools.bench.parts.attention_problem import AttentionCase, AttentionProblem, Sequence
from tools.bench.parts.engine import check
from tools.bench.parts.machine import Memory
from tools.bench.parts.problem import Settings
from tools.bench.parts.unavailable import UnavailableError

pytestmark = [
    pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="the probe of the memory is written for Linux"),
]

_KV_HEADS, _SIZE, _PAGE = 2, 32, 16
_SMALL = ["--heads", "4", "--kv-heads", str(_KV_HEADS), "--size", str(_SIZE), "--page", str(_PAGE), "--cache", "0.1"]
_ENGINES = [
    engine
    for module in (attention_graphopt, attention_onnxruntime, attention_torch, attention_ggml)
    for engine in module.engines()
]


MakeProblem = Callable[..., AttentionProblem]


def page_of(name: str) -> int:
    """Return the tokens of a page for a storage or an engine: as few as its codes allow."""
    storage = next((word for word in name.split("-") if word in LEVELS), None)
    return _PAGE if storage is None else max(_PAGE, STORAGE_OF[storage].unit)


@pytest.fixture
def make_problem(make_memory: Callable[[int], Memory], tmp_path: Path) -> MakeProblem:
    """Return a function that makes the problem of so many new tokens in a context."""

    def make(context: int, tokens: int, page: int = _PAGE) -> AttentionProblem:
        ggml = os.environ.get("GRAPHOPT_BENCH_GGML")
        settings = Settings(make_memory(1 << 17), tmp_path, Path(ggml) if ggml else None)
        case = AttentionCase(context, tokens, 4, _KV_HEADS, _SIZE, page, budget=48)
        return AttentionProblem(case, Sequence(_KV_HEADS, _SIZE), settings)

    return make


def _run(tmp_path: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    app = typer.Typer()
    app.command()(bench_attention.main)
    report = tmp_path / "attention.json"
    arguments = [*_SMALL, "--rounds", "2", "--threads", "1", "--json", str(report), *options]
    result = CliRunner().invoke(app, arguments, env={"GRAPHOPT_BENCH_GGML": None})
    return result.exit_code, result.output, json.loads(report.read_text()) if report.exists() else {}


def test_the_report_has_every_engine_that_is_there_and_the_reason_of_every_other(tmp_path: Path) -> None:
    engines = ["graphopt-int4", "graphopt-float32-bounds", "onnxruntime-gqa-int8"]
    options = ["--past", "256,1k", "--budget", "64", "--engines", ",".join([*engines, "llama.cpp-q8_0"])]
    code, output, report = _run(tmp_path, *options)
    assert code == 0, output
    assert {(row["case"]["context"], row["engine"]) for row in report["rows"]} == {
        (context, engine) for context in (256, 1024) for engine in engines
    }
    assert all(row["median_us"] > 0 and row["percent_of_bandwidth"] > 0 for row in report["rows"])
    assert set(report["absent"]) == {"llama.cpp-q8_0"}
    # query, y, key and value, then codes, a byte each, and a scale for each channel of keys and of values
    (row,) = [row for row in report["rows"] if row["engine"] == engines[-1] and row["case"]["context"] == 256]
    assert row["bytes"] == 4 * _SIZE * (2 * 4 + 2 * _KV_HEADS) + 2 * _KV_HEADS * _SIZE * (256 + 4)
    pairs = {(pair["engine"], pair["peer"]) for pair in report["comparisons"]}
    assert not pairs, "no engine's peer took part"


_CURVE = ["--past", "", "--curve", "--curve-past", "128,512", "--curve-budgets", "64,256"]


def test_the_curve_has_a_point_for_each_budget_that_is_less_than_the_context(tmp_path: Path) -> None:
    code, output, report = _run(tmp_path, *_CURVE)
    assert code == 0, output
    assert {curve["name"]: curve["x"] for curve in report["curves"]} == {
        "dense": [128, 512],
        "budget 64": [128, 512],
        "budget 256": [512],
    }
    assert {row["case"]["kind"] for row in report["rows"]} == {"curve"}


def test_the_plot_shows_the_curve(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "curve.html"
    code, output, _ = _run(tmp_path, *_CURVE, "--plot", str(page))
    assert code == 0, output
    assert "budget 256" in page.read_text()


@pytest.mark.parametrize(
    "options",
    [["--past", "many"], ["--past", "4", "--tokens", "4"], ["--heads", "3"], ["--page", "48"], ["--engines", "none"]],
)
def test_what_cannot_be_timed_is_refused(tmp_path: Path, options: list[str]) -> None:
    code, output, report = _run(tmp_path, *options)
    assert code == 2, output
    assert not report


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("engine", _ENGINES, ids=lambda engine: engine.name)
def test_every_engine_computes_attention(make_problem: MakeProblem, engine: Any, tokens: int) -> None:
    if engine.name.startswith("llama.cpp") and not os.environ.get("GRAPHOPT_BENCH_GGML"):
        pytest.skip("GRAPHOPT_BENCH_GGML names no build of llama.cpp")
    problem = make_problem(251, tokens, page_of(engine.name))
    if tokens > 1 and engine.name.endswith("-grouped"):
        with pytest.raises(UnavailableError, match="several new tokens"):
            engine.prepare(problem)
        return
    preparation = engine.prepare(problem)
    assert check(engine, preparation, problem) <= engine.tolerance
    first = np.array(preparation.outputs()[-1])
    preparation.run()
    np.testing.assert_array_equal(preparation.outputs()[-1], first, "a step that is repeated is the same")


def test_an_engine_that_computes_something_else_is_not_timed(make_problem: MakeProblem) -> None:
    problem = make_problem(100, 1)
    engine = next(engine for engine in _ENGINES if engine.name == "graphopt-int8-bounds")
    preparation = engine.prepare(problem)
    assert preparation.copies > 1
    with pytest.raises(UnavailableError, match="wrong: copy 0"):
        check(engine, replace(preparation, reference=preparation.reference * 1.1), problem)
    first, *other_outputs = preparation.outputs()
    not_numbers = [np.full_like(y, np.nan) for y in other_outputs]
    with pytest.raises(UnavailableError, match="wrong: copy 1"):
        check(engine, replace(preparation, outputs=lambda: [first, *not_numbers]), problem)


def test_a_step_that_would_round_another_page_each_time_is_refused(make_problem: MakeProblem) -> None:
    problem = make_problem(_PAGE * 4 + 1, 2)
    with pytest.raises(UnavailableError, match="lie in two pages"):
        _ENGINES[0].prepare(problem)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("policy", "summary"), [(DENSE, "bounds"), (STREAMING, "bounds"), (RETRIEVAL, "bounds"), (RETRIEVAL, "mean")]
)
def test_the_state_is_what_the_operator_leaves(storage: str, policy: int, summary: str) -> None:
    """Float64 attention too, and which tokens it reads."""
    context, tokens, page = 150, 2, page_of(storage)
    is_rounded = storage.startswith("int")
    attrs = KVAttributes(
        kv_heads=_KV_HEADS,
        scale=_SIZE**-0.5,
        page=page,
        storage=storage,
        sink_pages=int(is_rounded),
        recent_pages=int(is_rounded),
        policies=(policy,),
        sinks=4,
        recent=20,
        budget=3,
        summary=summary,
    )
    pages = 5 if policy == STREAMING else 10
    sequence = Sequence(_KV_HEADS, _SIZE)
    case = AttentionCase(context, tokens, 4, _KV_HEADS, _SIZE, page, budget=48)
    problem = AttentionProblem(case, sequence, None)  # type: ignore[arg-type]
    state = attrs.state(1, pages, _SIZE).zeros()
    empty, y = np.zeros(0, np.float32), np.zeros(0)
    arrays = [np.array([sequence.read_tokens(head, 0, context)[part] for head in range(_KV_HEADS)]) for part in (0, 1)]
    steps = [*range(0, context - tokens, 4), context - tokens]
    for past, end in zip(steps, [*steps[1:], context], strict=True):
        query = np.zeros((end - past, 4, _SIZE), np.float32) if end < context else problem.query
        key, value = (array[:, past:end].swapaxes(0, 1).reshape(1, end - past, -1) for array in arrays)
        inputs = (query.reshape(1, end - past, -1), key, value, np.array([past]), np.array([end - past]), empty, empty)
        y, *new_states = reference(*inputs, *state.values(), **attrs.for_node())
        state = dict(zip(state, new_states, strict=True))
    fast_state = attention_state.fill(attrs, sequence, context, pages, threads=1)
    fast_state["summaries"] = state["summaries"]
    if policy == RETRIEVAL:
        fast_state["summaries"] = attention_state.summarize(summary, page, sequence, context, pages, threads=1)
        # A running mean is rounded at every token, up to 16 times, a sum is too.
        np.testing.assert_allclose(fast_state["summaries"], state["summaries"], rtol=0, atol=16 * 2e-6)
        if summary == "bounds":
            np.testing.assert_array_equal(fast_state["summaries"], state["summaries"])
    contents = [attention_state.decode(attrs, tensors, 1, context, _SIZE) for tensors in (fast_state, state)]
    for left, right in zip(*contents, strict=True):
        np.testing.assert_array_equal(left, right)
    masks = attention_state.masks(attrs, fast_state, problem)
    # Both are float64.
    np.testing.assert_allclose(
        attention_state.reference(attrs, fast_state, problem, masks).reshape(y.shape), y, rtol=0, atol=1e-12
    )
