"""`search --cluster` measures what one process measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphopt.compile.clusters.executor import ClusterExecutor
from graphopt.compile.search import MixtureSearch, search
from graphopt.compile.search.choices import choice_of
from graphopt.passes.recipe import load_recipe
from graphopt.quantization.statistics.options import CalibrationOptions

pytest.importorskip("distributed", reason="distributed is not installed, of the extra `cluster`")

pytest.importorskip("scipy")  # of the extra `search`


def test_losses_are_those_of_one_process(llama_artifact: Path, executor: ClusterExecutor, tmp_path: Path) -> None:
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

    apart = search(llama_artifact, 50_000, tmp_path / "apart", jobs=executor, on_stage=say, **options)
    here = search(llama_artifact, 50_000, tmp_path / "here", **options)
    assert apart.model_dump_json() == here.model_dump_json()
    assert apart.judged_mixtures > 2
    for kind in ("search", "mixtures"):
        files = [next((tmp_path / name).glob(f"{kind}-*.jsonl")).read_text() for name in ("apart", "here")]
        rows = [sorted(map(json.loads, file.splitlines()), key=str) for file in files]
        assert rows[0] == rows[1]
    assert any(stage.startswith("rounding ") and "worker" in stage for stage in stages)
    assert not list(tmp_path.glob("*/experiment-*"))
