"""What a worker leaves behind when it ends: a request that crashed it goes to no other one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphopt.serving.journal import FolderStore, Journal

ROOT = Path(__file__).parents[2]
WORKER = """
import os, signal, sys
from pathlib import Path
from graphopt.serving.journal import Journal
journal = Journal(Path(sys.argv[1]))
journal.watch()
journal.take("{name}", 7, 123)
{then}
os.kill(os.getpid(), signal.{number})
"""


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


def end_of_a_worker(folder: Path, number: str, statements: str = "", name: str = "a") -> None:
    """Let another process take a request of 7 tokens, and end by a signal."""
    script = WORKER.format(number=number, then=statements, name=name)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run([sys.executable, "-c", script, str(folder)], env=environment, capture_output=True)
    assert process.returncode < 0


def test_a_request_that_crashed_its_worker_is_refused(journal: Journal, tmp_path: Path) -> None:
    end_of_a_worker(tmp_path, "SIGSEGV")
    with pytest.raises(ValueError, match="crashed while it read this request"):
        journal.take("a", 7, 0)
    assert journal.take("b", 7, 5).seed == 5
    # whose engine could not go on
    end_of_a_worker(tmp_path, "SIGKILL", 'journal.note_crash("not healthy")', name="c")
    with pytest.raises(ValueError, match="crashed"):
        journal.take("c", 7, 0)


def test_a_request_whose_worker_was_killed_goes_on(journal: Journal, tmp_path: Path) -> None:
    end_of_a_worker(tmp_path, "SIGKILL")
    entry = journal.take("a", 9, 0)
    # where the prompt ends, and its random numbers
    assert (entry.prompt, entry.seed, entry.worker) == (7, 123, journal.name)
    journal.end("a")
    assert journal.take("a", 9, 0).prompt == 9


def test_a_request_of_which_there_are_tokens_goes_on(journal: Journal, tmp_path: Path) -> None:
    end_of_a_worker(tmp_path, "SIGABRT", 'journal.note_token("a")')
    assert journal.take("a", 9, 0).prompt == 7
    # and then no further: nothing was made of these nine tokens
    second_journal = Journal(tmp_path)
    journal.note_crash("not healthy")
    with pytest.raises(ValueError, match="crashed"):
        second_journal.take("a", 9, 0)


def test_of_other_machines_two_workers_may_be_lost_with_a_request(tmp_path: Path) -> None:
    store, machines = FolderStore(tmp_path), [tmp_path / name for name in "abcd"]
    for machine in machines:
        machine.mkdir()
    for machine in machines[:2]:
        entry = Journal(machine, store).take("a", 7, 5)
        assert (entry.prompt, entry.seed) == (7, 5)
    with pytest.raises(ValueError, match="2 workers were lost while they read this request"):
        Journal(machines[2], store).take("a", 7, 5)
    # one that made tokens was not lost because of it
    for machine in machines:
        journal = Journal(machine, store)
        assert journal.take("b", 9, 5).prompt == 9
        journal.note_token("b")


def test_a_request_goes_on_without_a_journal_that_cannot_be_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(tmp_path, FolderStore(tmp_path / "unmounted"))
    assert journal.take("a", 7, 5).prompt == 7
    journal.end("a")
    assert "the journal of requests cannot be reached" in capsys.readouterr().err
