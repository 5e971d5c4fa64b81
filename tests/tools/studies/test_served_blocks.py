"""How far blocks move logits: prompts of both ways are the same, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from graphopt.passes.cache.quantize_kv import QuantizeKV
from graphopt.passes.interface.serve.serve import Serve
from tools.studies import served_blocks


def test_logits_of_pages_and_of_blocks_are_those_behind_each_prompt(
    llama_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = QuantizeKV(storage="float16")
    monkeypatch.setattr(served_blocks, "caches", lambda: {"pages": (half, None), "blocks": (half, Serve(block=16))})
    text = [int(token) for token in np.random.default_rng(0).integers(1, 290, 35)]
    rows = served_blocks.measure(text, [3, 20, 35], llama_artifact, tmp_path)
    assert [row.cache for row in rows] == ["pages", "blocks"]
    for row in rows:
        # float16 rounds by 5e-4 at most; logits behind another token differ by tenths
        assert 0 < row.mean <= row.largest < 5e-3
        assert row.up_to_192 == row.mean


def test_lengths_that_leave_nothing_to_compare_are_refused() -> None:
    app = typer.Typer()
    app.command()(served_blocks.main)
    for options in (["--first", "193"], ["--first", "50", "--last", "49"]):
        result = CliRunner().invoke(app, options)
        assert result.exit_code == 2
        assert "at most 192" in result.output
