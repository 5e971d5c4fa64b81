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
    kept, out = tmp_path / "kept", tmp_path / "out"
    made = run("calibrate", llama_artifact, "-r", recipe, "-o", kept, "--json")
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    assert {each["tokens"] for each in found} == {300}
    table = run("calibrate", llama_artifact, "-r", recipe, "-o", kept)
    assert all(word in table.output for word in ("kurtosis", "largest", "300", "--statistics"))
    missing = run("optimize", llama_artifact, "-r", recipe, "-o", out, "--no-run")
    assert "graphopt calibrate MODEL" in str(missing.exception)
    done = run("optimize", llama_artifact, "-r", recipe, "-o", out, "--no-run", "--statistics", kept, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["recipe"]["calibration"]["windows"] == 3
    checked = run("verify", llama_artifact, out, "--no-run", "--statistics", kept, "--json")
    assert checked.exit_code == 0, checked.output
    assert "proved" in {check["status"] for check in json.loads(checked.stdout)["checks"]}
