"""The benchmark of CUDA operators: what it needs, what it calls wrong, how it compares. Times need a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

from tools.bench import gpu as bench_cuda
from tools.bench.parts import cuda_hadamard, cuda_kv_attention, cuda_matmul
from tools.bench.parts.cuda_case import Case


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_exits_2() -> None:
    app = typer.Typer()
    app.command()(bench_cuda.main)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert result.stderr == "nothing was run: torch finds no NVIDIA GPU\n"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A torch whose events read a clock that calls advance."""
    state = SimpleNamespace(milliseconds=0.0)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.instant = 0.0

        def record(self) -> None:
            self.instant = state.milliseconds

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return end.instant - self.instant

    class CUDAGraph:
        """Replays by running what was recorded again: the clock stands still while it is recorded."""

        def replay(self) -> None:
            state.milliseconds += self.duration

    @contextmanager
    def graph(recording: CUDAGraph) -> Iterator[None]:
        start = state.milliseconds
        yield
        recording.duration, state.milliseconds = state.milliseconds - start, start

    state.cuda = SimpleNamespace(Event=Event, synchronize=lambda: None, CUDAGraph=CUDAGraph, graph=graph)
    return state


def case(clock: SimpleNamespace, error: float) -> tuple[Case, list[str]]:
    log: list[str] = []

    def takes(name: str, milliseconds: float):
        def call(copy: int) -> None:
            log.append(f"{name} {copy}")
            clock.milliseconds += milliseconds

        return call

    rivals = {"a": takes("a", 0.006)}
    timed_case = Case("a case", 4000, 3, takes("poison", 0), takes("run", 0.002), lambda _: error, 0.1, rivals)
    return timed_case, log


def test_a_case_is_checked_poisoned_and_timed_beside_its_rivals(clock: SimpleNamespace) -> None:
    timed_case, log = case(clock, 0.01)
    row = bench_cuda.measure(clock, timed_case, 5)
    assert log[:4] == ["poison 0", "run 0", "poison 2", "run 2"]
    assert row["us"] == pytest.approx({"graphopt": 2, "a": 6})
    assert row["times_as_fast_as"] == pytest.approx({"a": 3})
    assert row["bandwidth"] == pytest.approx(2e9)
    assert bench_cuda.show(row, 4e9).startswith("a case: graphopt 2.0 us, a 6.0 us; 3.00x a; 50% of copy bandwidth")


@pytest.mark.parametrize("error", [0.2, float("nan")])
def test_a_wrong_case_is_not_timed(clock: SimpleNamespace, error: float) -> None:
    timed_case, log = case(clock, error)
    row = bench_cuda.measure(clock, timed_case, 5)
    assert row["wrong"]
    assert len(log) == 4
    assert "WRONG" in bench_cuda.show(row, 1.0)


def test_cases_of_hadamard_compute_what_they_check(interpreted: ctypes.CDLL) -> None:
    """On tensors of the CPU, by the host interpreter; the same code runs on a GPU."""
    for timed_case in cuda_hadamard.cases(interpreted, torch, "cpu", widths=(96, 1024), rows=(1, 3)):
        timed_case.poison(1)
        assert not timed_case.error(1) <= timed_case.tolerance
        timed_case.run(1)
        assert timed_case.error(1) <= timed_case.tolerance
        assert timed_case.bytes_moved == 4 * int(timed_case.name.split()[1]) * int(timed_case.name.split()[3])
        for rival in timed_case.rivals.values():
            rival(0)


def test_products_of_the_benchmark_are_right(interpreted: ctypes.CDLL) -> None:
    cases = list(cuda_matmul.cases(interpreted, torch, "cpu", shapes=((256, 48),), rows=(3, 20)))
    assert len(cases) == 2 * len(cuda_matmul.KINDS)
    for case in cases:
        case.poison(1)
        assert not case.error(1) <= case.tolerance
        case.run(1)
        assert case.error(1) <= case.tolerance
        for rival in case.rivals.values():
            rival(0)


@pytest.mark.parametrize(
    ("patterns", "rows", "is_wanted"),
    [
        (["*"], [], True),
        (["*"], ["8"], False),
        (["Hadamard*", "* t3,*"], ["1", "18"], True),
        (["* t4,*"], ["18"], False),
    ],
)
def test_cases_are_chosen_by_pattern_and_rows(patterns: list[str], rows: list[str], is_wanted: bool) -> None:
    name = "MatMulTable t3, x in float16, 18 rows, 8192 x 8192"
    assert bench_cuda.is_wanted(name, patterns, rows) == is_wanted


def test_cases_of_kv_attention_compute_what_they_check(interpreted: ctypes.CDLL) -> None:
    sizes = ((2, 192, 1), (1, 640, 1), (1, 192, 4), (1, 192, 128))
    retrievals = ((2, 640, 1, 192), (1, 640, 4, 128))
    for timed_case in cuda_kv_attention.cases(
        interpreted, torch, "cpu", sizes=sizes, retrievals=retrievals, heads=(6, 2), size=32
    ):
        timed_case.poison(1)
        assert not timed_case.error(1) <= timed_case.tolerance
        timed_case.run(1)
        assert timed_case.error(1) <= timed_case.tolerance
        retrieves = "retrieval" in timed_case.name
        assert list(timed_case.rivals) == (["all tokens"] if retrieves else [])
        for rival in timed_case.rivals.values():
            rival(1)
            assert timed_case.error(1) <= timed_case.tolerance  # it writes elsewhere
