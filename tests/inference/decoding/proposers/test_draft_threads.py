from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphopt.errors import InputError
from graphopt.inference.decoding.proposers import draft_threads, open_draft_model
from graphopt.inference.session import Session, load, open_folder, session_from
from graphopt.ort.session import Entries


def opener(folder: Path, calls: list[tuple[int, dict[str, str]]]) -> Any:
    def open_with(threads: int, entries: Entries) -> Session:
        calls.append((threads, dict(entries)))
        return session_from(open_folder(folder, threads=threads, entries=entries))

    return open_with


def threads_of(session: Session) -> int:
    threads: int = session.inference.get_session_options().intra_op_num_threads
    return threads


@pytest.mark.parametrize(("shared_seconds", "threads"), [(0.5, 2), (0.97, 1), (2.0, 1)])
def test_the_faster_number_of_threads_is_kept(
    llama_artifact: Path, monkeypatch: pytest.MonkeyPatch, shared_seconds: float, threads: int
) -> None:
    def seconds(turn: Any) -> float:
        return shared_seconds if threads_of(turn.smaller) == 2 else 1.0

    monkeypatch.setattr(draft_threads._Turn, "seconds", seconds)
    calls: list[tuple[int, dict[str, str]]] = []
    session = draft_threads.choose_threads(load(llama_artifact, threads=2), opener(llama_artifact, calls))
    assert calls == [(1, {}), (2, draft_threads.STOP)]
    assert threads_of(session) == threads


def test_one_thread_is_one_thread(llama_artifact: Path) -> None:
    calls: list[tuple[int, dict[str, str]]] = []
    session = draft_threads.choose_threads(load(llama_artifact, threads=1), opener(llama_artifact, calls))
    assert (calls, threads_of(session)) == ([(1, {})], 1)


def test_turns_are_measured(llama_artifact: Path) -> None:
    session = load(llama_artifact, threads=2)
    turn = draft_threads._Turn(session, load(llama_artifact, threads=1))
    assert turn.seconds() > 0
    assert turn.seconds() > 0  # caches are rewound: a second turn begins where the first did


def test_a_model_with_other_tokens_is_refused(llama_artifact: Path, shipped_artifact: Path) -> None:
    with pytest.raises(InputError, match="tokenizer"):
        open_draft_model(load(shipped_artifact, threads=2), llama_artifact)
