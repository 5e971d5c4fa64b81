from __future__ import annotations

import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from tools.bench.speculation import DRAFTERS, KINDS, main

app = typer.Typer()
app.command()(main)

SMALL = ["--modules", "1", "--window", "60", "--tokens", "9", "--rounds", "1", "--threads", "1"]


def test_each_drafter_is_timed_and_an_absent_server_is_said(shipped_artifact: Path, tmp_path: Path) -> None:
    options = ["--gguf", str(tmp_path / "model.gguf"), "--ggml", str(tmp_path), "--json", str(tmp_path / "rows")]
    result = CliRunner().invoke(app, [str(shipped_artifact), *SMALL, *options])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "rows").read_text())
    assert [(row["engine"], row["drafts"]) for row in rows] == [("graphopt", name or "none") for name in DRAFTERS]
    assert all(row[kind] > 0 for row in rows for kind in KINDS)
    assert result.output.count("absent: llama.cpp") == 5
    assert "llama-server is not there" in result.output.replace("\n", "")
