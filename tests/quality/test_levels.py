"""Codes are read back from a graph in any form, and the numbers of a weight are counted among their levels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from graphopt.artifact import artifact
from graphopt.compile.losses import losses
from graphopt.compile.pipeline import optimize
from graphopt.passes.recipe import Recipe
from graphopt.quality.levels import BINS, grid_of
from graphopt.report.page.charts import histogram_chart
from graphopt.util.targets import ChosenTarget

# One matrix of the Llama in each format; the others are int4.
FORMATS = {"0.mlp.down": "uint4", "0.mlp.up": "nf4", "0.mlp.gate": "fp6-e2m3", "1.mlp.down": "int8", "1.mlp.up": "int3"}
TEXT = ["def f(x): return x\n" * 40]


@pytest.mark.parametrize("target", ["portable", "ort-cpu:avx512"])
def test_codes_mean_the_weight_that_was_rounded(llama_artifact: Path, target: ChosenTarget) -> None:
    matrices = {f"model.layers.{name}_proj.weight": {"format": format, "group": 32} for name, format in FORMATS.items()}
    options = {"linear": {"format": "int4", "group": 32}, "matrices": matrices}
    steps = [{"step": "canonicalize"}, {"step": "quantize_weights", **options}]
    exact = {node.name: node for node in artifact.read(llama_artifact).model.graph}
    recipe = Recipe(name="several", steps=steps)  # type: ignore[arg-type]
    result = optimize(llama_artifact, recipe, target=target, run=False, quality_tokens=0)
    sizes = Counter[int]()
    for node in result.model.graph:
        if not (node.name or "").endswith("_proj.MatMul"):
            continue
        grid = grid_of(node)
        assert grid is not None
        sizes[len(grid.levels)] += 1
        units = grid.in_units(exact[node.name].inputs[1].const_value.numpy().astype(np.float64))
        assert units.shape == grid.values.shape
        # rounding to nearest: no level is nearer than the one whose code is stored; float32 decides ties
        nearest = np.abs(units[..., None] - grid.levels).min(-1)
        assert np.abs(units - grid.values) == pytest.approx(nearest, abs=1e-3)
    # e2m3 has two zeros; for ort-cpu queries, keys and values are one product, under another name
    assert {size: count for size, count in sizes.items() if size != 16} == {63: 1, 256: 1, 8: 1}
    assert sizes[16] >= 5


def test_histograms_are_counted_where_they_are_asked_for(llama_artifact: Path, tmp_path: Path) -> None:
    optimize(llama_artifact, "rotate-int4-rtn", tmp_path / "made", run=False, quality_tokens=0)
    assert losses(llama_artifact, tmp_path / "made", TEXT, tokens=32, window=32, restore=False).histograms == []
    loss_report = losses(llama_artifact, tmp_path / "made", TEXT, tokens=32, window=32, restore=False, weights=True)
    by_role = {histogram.role: histogram for histogram in loss_report.histograms}
    assert {"q_proj", "down_proj"} <= by_role.keys()
    for histogram in loss_report.histograms:
        assert sum(histogram.used) == pytest.approx(1)
        assert len(histogram.counts) == BINS
        assert len(histogram.levels) in (16, 256)
        chart = histogram_chart(histogram)
        assert chart.count('class="level-line"') == (16 if len(histogram.levels) == 16 else 0)
    down = by_role["down_proj"]
    # rounding to nearest moves no number by more than half a step: most lie between the ends
    inside = sum(down.counts[1:-1]) / sum(down.counts)
    assert inside > 0.99
