"""A proposer in one file: found, listed, and used from the command line; names that stand for nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graphopt.cli import app
from graphopt.errors import InputError
from graphopt.inference.decoding.proposers.registry import PROPOSERS, find_proposer, list_proposers
from tests.registry_files import file_added

SOURCE = '''
"""Says the last token again and again."""

from graphopt.inference.decoding.proposer import Guess, Proposer


class Echo(Proposer):
    name = "echo"
    takes_options = True
    usage = "echo:N"
    summary = "the last token N times"

    def __init__(self, count):
        self.count = count

    @classmethod
    def open(cls, session, options):
        return cls(int(options))

    def begin(self, rows):
        self.rows = rows

    def propose(self, prefixes, limits):
        counts = [min(self.count, limit) for limit in limits]
        return [[Guess(row.tokens[-1], 0.5, "echo")] * count for row, count in zip(self.rows, counts)]

    def commit(self, row, tokens):
        pass
'''


@pytest.mark.usefixtures("costs_are_measured_briefly")
def test_a_proposer_is_one_file(llama_artifact: Path, tmp_path: Path) -> None:
    arguments = ["run", str(llama_artifact), "--prompt", "def f(x):", "--max-new-tokens", "12", "--json"]
    plain = json.loads(CliRunner().invoke(app, arguments).stdout)
    with file_added(PROPOSERS, "graphopt.inference.decoding.proposers", tmp_path, SOURCE):
        options = ["--speculate", "echo:2", "--draft-tokens", "3", "--stats"]
        report = json.loads(CliRunner().invoke(app, [*arguments, *options]).stdout)
        assert list_proposers()["echo:N"] == "the last token N times"
        assert "echo:N: the last token N times" in CliRunner().invoke(app, ["run", ".", "--speculate", "help"]).stdout
    assert report["completions"] == plain
    assert 1 <= len(report["drafts"]["acceptance"]["echo"]) <= 2  # no draft is longer than the option says
    assert "echo" not in PROPOSERS


def test_each_proposer_says_how_it_is_asked_for() -> None:
    assert {"grammar", "heads", "lookup", "self", "verified"} < set(PROPOSERS)
    assert all(kind.usage and kind.summary for kind in PROPOSERS.values())


def test_names_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("lookup", "self", "self:streaming"):
        (tmp_path / name).mkdir()
    assert find_proposer("lookup") == (PROPOSERS["lookup"], "")  # a name goes before a folder
    assert find_proposer("self:streaming") == (PROPOSERS["self"], "streaming")
    assert find_proposer("self") == (PROPOSERS["FOLDER"], "self")  # without options it is no drafts of itself
    assert find_proposer(str(tmp_path)) == (PROPOSERS["FOLDER"], str(tmp_path))
    for name in ("lookup:3", "heads:", "verified", "nothing"):
        with pytest.raises(InputError, match=f"no drafts '{name}', and no such folder.*known are auto, .*verified:A,B"):
            find_proposer(name)
