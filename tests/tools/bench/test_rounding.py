"""The benchmark of rounding: what it prints of a small layer and a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from graphopt.quantization.rounding import factors
from tools.bench import rounding
from tools.bench.rounding import calibration, gptq, integers, wide_part


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_layer_is_timed_beside_its_factorization(capsys: pytest.CaptureFixture[str]) -> None:
    gptq(rows=256, columns=128, formats=["int4", "nf4"], group=32, rounds=2)
    head, names, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("256 x 128, groups of 32; Cholesky ")
    assert cells(names)[0] == "format"
    assert [cells(row)[0] for row in rows] == ["`int4`", "`nf4`"]
    assert all(float(cell) > 0 for row in rows for cell in cells(row)[1:])


def test_a_factor_in_panels_is_timed_beside_a_whole_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factors, "WIDE", factors.WIDE)  # it is set on the way
    for kind in ("whole", "panels"):
        wide_part(kind, rows=96, columns=16, tokens=64, name="t4", file=tmp_path / f"{kind}.npy")
        costs = json.loads(capsys.readouterr().out)
        assert costs["seconds"] > 0
        # what Python alone takes
        assert costs["peak"] > 10e6
    whole, panels = (np.load(tmp_path / f"{kind}.npy") for kind in ("whole", "panels"))
    # see test_factors.py
    assert np.mean(whole != panels) < 0.02


def test_integers_are_timed_beside_floats(capsys: pytest.CaptureFixture[str]) -> None:
    integers(rows=64, columns=32, tokens=48, rounds=2)
    *rows, error = capsys.readouterr().out.splitlines()
    assert [row.split(":")[0] for row in rows] == [
        *(f"{subject} of {kind}" for subject in ("a product", "sums") for kind in ("floats", "integers")),
        "tokens as integers",
        "columns as integers",
    ]
    # normal numbers: 2.5 of 1023 / 12 ** 0.5 of a step on both sides
    assert 1e-4 < float(error.split()[-1]) < 2e-3


def test_a_model_is_timed_beside_a_prefill(
    llama_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_here(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Do a part in this process, which has imported all that each part would."""
        assert command[:2] == [sys.executable, rounding.__file__]
        return subprocess.CompletedProcess(command, 0, CliRunner().invoke(rounding.app, command[2:]).stdout)

    monkeypatch.setattr(rounding.subprocess, "run", run_here)
    calibration(llama_artifact, windows=2, window=64, output=tmp_path)
    head, _, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("2 x 64 tokens; a layer: ")
    assert [cells(row)[0] for row in rows] == ["opening", "prefill", "collecting"]
    # times, and megabytes that Python alone exceeds
    assert all(float(cells(row)[1]) > 0 and float(cells(row)[3]) > 0 and float(cells(row)[5]) > 10 for row in rows)
    assert float(cells(rows[2])[2]) > 0
    assert float(cells(rows[2])[4]) > 0
    assert list(tmp_path.rglob("*.hessian"))
