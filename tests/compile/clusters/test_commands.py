"""What commands compute on a cluster is what they compute in one process.

They are in one module since two workers take six seconds of a processor to start.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from graphopt.cli import app
from graphopt.compile.clusters.executor import ClusterExecutor
from graphopt.compile.clusters.kinds.local import Local
from graphopt.compile.pipeline import optimize
from graphopt.compile.search import MixtureSearch, search
from graphopt.compile.search.choices import choice_of
from graphopt.passes.recipe import load_recipe
from graphopt.quantization.statistics.options import CalibrationOptions
from tests.compile.test_resume import files_of

pytest.importorskip("distributed", reason="distributed is not installed, of the extra `cluster`")


def give(client: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """Let commands find two workers that are there already; return what they ask for: an address and a number."""
    requests = []

    class LocalKind(Local):
        def connect(self, address: str, jobs: int | None) -> Any:
            requests.append((address, jobs))
            return contextlib.nullcontext(client)

    monkeypatch.setattr("graphopt.compile.clusters.kind.KINDS", {"dask://": LocalKind})
    return requests


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Rotations, and codes by GPTQ."""
    steps: list[dict[str, Any]] = [
        {"step": "canonicalize"},
        {"step": "fold_norms"},
        {"step": "rotate"},
        {"step": "quantize_weights", "rounding": "gptq", "linear": {"format": "nl4", "group": 32}},
    ]
    (tmp_path / "text.txt").write_text("def f(x):\n    return [x, x + 1]\n" * 40)
    calibration = {"text": "text.txt", "windows": 3, "window": 100}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"name": "mine", "steps": steps, "calibration": calibration}))
    return file


def test_gptq_on_a_cluster_gives_the_bytes_of_one_process(
    llama_artifact: Path, tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, client: Any
) -> None:
    stages: list[str] = []

    @contextlib.contextmanager
    def progress() -> Iterator[Any]:
        yield lambda stage, count=0, total=None: stages.append(stage)

    requests = give(client, monkeypatch)
    monkeypatch.setattr("graphopt.cli.compile.progress", progress)
    optimize(llama_artifact, recipe, tmp_path / "plain", quality_tokens=0)
    arguments = ["optimize", llama_artifact, "-r", recipe, "-o", tmp_path / "out", "--quality-tokens", "0"]
    result = CliRunner().invoke(app, [*map(str, arguments), "--cluster", "dask://", "-j", "2"])
    assert result.exit_code == 0, result.output
    assert requests == [("dask://", 2)]
    assert files_of(tmp_path / "out") == files_of(tmp_path / "plain")
    work = {stage.partition(",")[0] for stage in stages if stage.endswith(("1 worker", "2 workers"))}
    assert {"evaluating weights", "writing", "collecting statistics"} <= work
    assert not list(tmp_path.glob(".*"))  # no work folder is left
    assert "cluster" not in {thread.name for thread in threading.enumerate()}


def run(*arguments: object) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    for row in rows:
        for name in [name for name in row if "seconds" in name]:
            del row[name]
    return rows


def test_tables_and_quality_have_the_rows_of_one_process(
    llama_artifact: Path, tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(client, monkeypatch)
    (tmp_path / "text.txt").write_text("def f(x):\n    return [x, x + 1]\n" * 40)
    reading = ["--text", tmp_path / "text.txt", "--tokens", "200", "--window", "50"]
    cluster = ["--cluster", "dask://"]
    recipes = ["int4-rtn", "fp6-rtn"]
    rows = run("table", llama_artifact, *recipes, *reading, "--keep", tmp_path / "kept", *cluster)
    assert rows == run("table", llama_artifact, *recipes, *reading)
    assert [row["recipe"] for row in rows] == ["int4-rtn", "fp6-rtn"]
    folders = [tmp_path / "kept" / name for name in recipes]
    quality_rows = run("quality", llama_artifact, *folders, *reading, *cluster)
    assert quality_rows == run("quality", llama_artifact, *folders, *reading)
    assert quality_rows[0]["kl_mean"] == rows[0]["kl_mean"]
    assert not (tmp_path / "kept" / "parcels").exists()
    assert not list((tmp_path / "kept").glob("cluster-*"))


def test_search_measures_the_losses_of_one_process(
    llama_artifact: Path, executor: ClusterExecutor, tmp_path: Path
) -> None:
    pytest.importorskip("scipy")  # of the extra `search`
    recipe = load_recipe("int4").model_copy(update={"calibration": CalibrationOptions(windows=2, window=64)})
    options: dict[str, Any] = {
        "recipe": recipe,
        "choices": [choice_of("nl3:64"), choice_of("nl4:64")],
        "tokens": 64,
        "mixtures": MixtureSearch(candidates=4, offspring=2, finalists=1, tokens=128),
    }
    stages: list[str] = []

    def say(stage: str, count: int = 0, total: int | None = None) -> None:
        stages.append(stage)

    cluster_result = search(llama_artifact, 50_000, tmp_path / "apart", jobs=executor, on_stage=say, **options)
    local_result = search(llama_artifact, 50_000, tmp_path / "here", **options)
    assert cluster_result.model_dump_json() == local_result.model_dump_json()
    assert cluster_result.judged_mixtures > 2
    for kind in ("search", "mixtures"):
        files = [next((tmp_path / name).glob(f"{kind}-*.jsonl")).read_text() for name in ("apart", "here")]
        rows = [sorted(map(json.loads, file.splitlines()), key=str) for file in files]
        assert rows[0] == rows[1]
    assert any(stage.startswith("rounding ") and "worker" in stage for stage in stages)
    assert not list(tmp_path.glob("*/experiment-*"))
