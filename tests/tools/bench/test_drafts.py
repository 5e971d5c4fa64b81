"""The benchmark of drafts as a tool: its tasks, its table, and the drafter that errs by chance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from graphopt.inference.session import load
from tests.native import needs_library
from tools.bench import drafts as bench_drafts
from tools.bench.parts.drafting import rename_identifier, tasks, tokens_of, write_text


def test_an_edit_changes_one_name_everywhere() -> None:
    assert rename_identifier("value = other + value\nvalues = 1\n") == "new_value = other + new_value\nvalues = 1\n"
    assert rename_identifier("x = 1\n") == "x = 1\n"


def test_the_tokens_of_a_step() -> None:
    assert tokens_of(0.5, 0) == 1
    assert tokens_of(0.5, 3) == 1.875
    assert tokens_of(1.0, 7) == 8


@needs_library
def test_rows_of_all_kinds(shipped_artifact: Path, tmp_path: Path) -> None:
    session = load(shipped_artifact, threads=1)
    (completing, editing, own_editing) = tasks(session, 60, 1)
    assert own_editing.prompt[: len(editing.prompt)] == editing.prompt
    assert editing.text_tokens is not None
    assert write_text(session, editing, 12)[0] == editing.text_tokens[:12]
    assert len(write_text(session, completing, 12)[0]) == 12
    app = typer.Typer()
    app.command()(bench_drafts.main)
    options = ["--drafter", "lookup", "--drafter", "known:1.0", "--draft-tokens", "3", "--json", str(tmp_path / "rows")]
    small = [
        "--modules",
        "1",
        "--window",
        "60",
        "--tokens",
        "17",
        "--rounds",
        "1",
        "--threads",
        "1",
        "--temperature",
        "0",
    ]
    result = CliRunner().invoke(app, [str(shipped_artifact), *options, *small])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "rows").read_text())["rows"]
    assert [row["task"] for row in rows] == [kind for kind in ("completing", "editing", "own editing") for _ in "ab"]
    for row in rows:
        assert row["ratio"] > 0
        if row["drafter"] == "lookup":
            assert row["predicted"] is None
        else:
            assert row["tokens_per_pass"] == pytest.approx(4)
            assert row["predicted"] > 0
            assert set(row["acceptance"]["known"]) == {1.0}
