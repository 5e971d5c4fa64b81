"""The needle test as a tool: its table, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tools.studies import needle


def run(tmp_path: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    app = typer.Typer()
    app.command()(needle.main)
    report = tmp_path / "needle.json"
    result = CliRunner().invoke(app, [*options, "--json", str(report)])
    return result.exit_code, result.output, json.loads(report.read_text()) if report.exists() else {}


def test_each_policy_finds_what_the_papers_say(tmp_path: Path) -> None:
    sizes = ["--contexts", "2k", "--depths", "5", "--trials", "3", "--size", "64", "--budget", "256"]
    code, output, report = run(tmp_path, *sizes, "--common", "0.85")
    assert code == 0, output
    assert {row["policy"]: row["found"] for row in report["rows"]} == {
        "dense": [3] * 5,
        "streaming": [3, 0, 0, 0, 3],
        "retrieval, bounds": [3] * 5,
        "retrieval, mean": [3] * 5,
    }
    # cosine times the root of 64 channels, of which the common vector takes all but 0.15 of the squared norm
    assert report["margin"] == pytest.approx(0.9 * (64 / 0.15) ** 0.5)


def test_a_mean_needs_more_the_longer_the_page_and_bounds_less_the_fewer_the_channels() -> None:
    def least_margin(page: int, summary: str, channels: int) -> float:
        margin = needle.least_margin(page, summary, channels, size=64, context=4096, budget=256)
        assert margin is not None
        return margin

    # A sixteenth of the pages is read, so the page's mean must be above 1.53 of its own deviations, 1 / sqrt(T) of a
    # key's, and 99% of them are if it is 2.33 above that: 3.9 sqrt(T). Steps are of 1; 200 draws are good to 10%.
    for page in (16, 64):
        assert least_margin(page, "mean", 64) == pytest.approx(3.9 * page**0.5, rel=0.15)
    narrow, wide = least_margin(64, "bounds", 4), least_margin(64, "bounds", 64)
    assert narrow < 12 < wide


@pytest.mark.parametrize("options", [["--page", "48"], ["--storage", "int3"], ["--size", "40"], ["--contexts", "0"]])
def test_what_cannot_be_asked_is_refused(tmp_path: Path, options: list[str]) -> None:
    code, output, report = run(tmp_path, *options)
    assert code == 2, output
    assert not report
