"""Work that is shared among threads."""

from __future__ import annotations

import threading

import pytest

from graphopt.util.processors import run_in_threads


def test_every_part_is_done_once_by_as_many_threads_as_there_are_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    barrier, parts, threads = threading.Barrier(2, timeout=20), [], set()

    def work(part: int) -> None:
        if part < 2:
            barrier.wait()  # two threads at once, or it would break
        parts.append(part)
        threads.add(threading.get_ident())

    run_in_threads(work, range(40))
    assert sorted(parts) == list(range(40))
    assert len(threads) == 2
    assert threading.get_ident() in threads


@pytest.mark.parametrize("processors", ["1", "2"])
def test_the_first_error_ends_the_call(processors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", processors)
    parts = []

    def work(part: int) -> None:
        parts.append(part)
        raise ValueError(f"part {part}")

    with pytest.raises(ValueError, match="part [01]"):
        run_in_threads(work, range(10))
    assert len(parts) <= 2  # one of each thread


def test_a_call_within_another_does_not_wait_for_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    parts: list[int] = []
    # each call of two parts leaves a processor to those within
    run_in_threads(lambda _: run_in_threads(parts.append, range(5)), range(2))
    assert sorted(parts) == sorted(2 * list(range(5)))


def test_processors_of_a_call_that_ended_help_one_that_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    short_runs, ends_short = threading.Event(), threading.Event()
    barrier = threading.Barrier(2, timeout=20)

    def run_short(_: int) -> None:
        short_runs.set()
        assert ends_short.wait(20)

    def run_long(part: int) -> None:
        if part == 0:
            ends_short.set()
        else:
            barrier.wait()  # two threads at once, or it would break

    short_call = threading.Thread(target=run_in_threads, args=(run_short, range(1)))
    short_call.start()
    assert short_runs.wait(20)
    run_in_threads(run_long, range(3))  # begins with one thread: the other processor is busy
    short_call.join(20)
    assert not short_call.is_alive()
