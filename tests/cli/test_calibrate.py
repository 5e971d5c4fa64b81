"""The command `calibrate`, and the option --statistics of those that read what it collected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from graphopt.cli import app


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("def f(x):\n    return [x, x + 1]\n" * 40)
    steps: list[dict[str, Any]] = [{"step": "canonicalize"}, {"step": "quantize_weights", "rounding": "gptq"}]
    calibration = {"text": "text.txt", "windows": 3, "window": 100}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"name": "mine", "steps": steps, "calibration": calibration}))
    return file


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_what_was_collected_ahead_is_enough_for_no_run(llama_artifact: Path, recipe: Path, tmp_path: Path) -> None:
    statistics, out = tmp_path / "kept", tmp_path / "out"
    calibration = run("calibrate", llama_artifact, "-r", recipe, "-o", statistics, "--json")
    assert calibration.exit_code == 0, calibration.output
    rows = json.loads(calibration.stdout)
    assert {row["tokens"] for row in rows} == {300}
    table = run("calibrate", llama_artifact, "-r", recipe, "-o", statistics)
    assert all(word in table.output for word in ("kurtosis", "largest", "300", "--statistics"))
    missing = run("optimize", llama_artifact, "-r", recipe, "-o", out, "--no-run")
    assert "graphopt calibrate MODEL" in str(missing.exception)
    optimization = run(
        "optimize", llama_artifact, "-r", recipe, "-o", out, "--no-run", "--statistics", statistics, "--json"
    )
    assert optimization.exit_code == 0, optimization.output
    assert json.loads(optimization.stdout)["recipe"]["calibration"]["windows"] == 3
    verification = run("verify", llama_artifact, out, "--no-run", "--statistics", statistics, "--json")
    assert verification.exit_code == 0, verification.output
    assert "proved" in {check["status"] for check in json.loads(verification.stdout)["checks"]}
