"""`table` and `quality` with a cluster print what they print without."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from graphopt.cli import app
from graphopt.compile.clusters.kinds.local import Local

pytest.importorskip("distributed", reason="distributed is not installed, of the extra `cluster`")


def run(*arguments: object) -> list[dict[str, Any]]:
    ran = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert ran.exit_code == 0, ran.output
    rows: list[dict[str, Any]] = json.loads(ran.stdout)
    for row in rows:
        for name in [name for name in row if "seconds" in name]:
            del row[name]
    return rows


def test_rows_are_those_of_one_process(
    llama_artifact: Path, tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Here(Local):
        def connect(self, address: str, jobs: int | None) -> Any:
            return contextlib.nullcontext(client)

    monkeypatch.setattr("graphopt.compile.clusters.kind.KINDS", {"dask://": Here})
    (tmp_path / "text.txt").write_text("def f(x):\n    return [x, x + 1]\n" * 40)
    reading = ["--text", tmp_path / "text.txt", "--tokens", "200", "--window", "50"]
    cluster = ["--cluster", "dask://"]
    recipes = ["int4-rtn", "fp6-rtn"]
    rows = run("table", llama_artifact, *recipes, *reading, "--keep", tmp_path / "kept", *cluster)
    assert rows == run("table", llama_artifact, *recipes, *reading)
    assert [row["recipe"] for row in rows] == ["int4-rtn", "fp6-rtn"]
    folders = [tmp_path / "kept" / name for name in recipes]
    both = run("quality", llama_artifact, *folders, *reading, *cluster)
    assert both == run("quality", llama_artifact, *folders, *reading)
    assert both[0]["kl_mean"] == rows[0]["kl_mean"]
    assert not (tmp_path / "kept" / "parcels").exists()
    assert not list((tmp_path / "kept").glob("cluster-*"))
