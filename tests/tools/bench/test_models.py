"""The recipes that whole models are compared with: they load, and mean what their peers are built as."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphopt.passes.recipe import load_recipe

RECIPES = sorted((Path(__file__).parents[3] / "tools" / "bench" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_of_the_benchmark_can_be_used(file: Path) -> None:
    recipe = load_recipe(file).with_lower("ort-cpu")
    assert recipe.name == file.stem
    has_pages, steps = recipe.name != "int4-growing", {step.name: step for step in recipe.passes()}
    assert {"quantize_weights", "merge_products"} <= set(steps)
    assert ("page_kv" in steps, steps["lower"].caches == "growing") == (has_pages, not has_pages)
    assert ("last_logits" in steps) == has_pages
