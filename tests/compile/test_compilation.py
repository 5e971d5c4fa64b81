"""What belongs to a run of the compiler lies in one class, and whoever runs passes asks it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import graphopt
from graphopt.artifact import artifact
from graphopt.compile.compilation import Compilation
from graphopt.compile.losses import losses
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.passes.recipe import Recipe, load_recipe
from graphopt.quantization.statistics.options import CalibrationOptions

PACKAGE = Path(graphopt.__file__).parent


def callers_of(name: str) -> list[str]:
    """Return the modules that call a function or class by this name, once for each call."""
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py"))}
    return [
        file.relative_to(PACKAGE).as_posix()
        for file, text in texts.items()
        if name in text  # parsing them all takes seconds
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def test_one_place_makes_a_context() -> None:
    assert callers_of("Context") == ["passes/context.py"]
    # that of a compilation, and that of a pass which is called alone
    assert callers_of("make_context") == ["compile/compilation.py", "passes/base.py"]


def test_one_place_collects_statistics_and_one_verifies() -> None:
    for name in ("Calibration", "Verifier", "run_passes"):
        assert [caller for caller in callers_of(name) if caller != "compile/calibration/heads.py"] == [
            "compile/compilation.py"
        ], name


@pytest.mark.parametrize("preset", ["w4a4", "small"])
def test_losses_are_located_where_steps_need_statistics(llama_artifact: Path, tmp_path: Path, preset: str) -> None:
    # A short text: what is tested is that the reference of the exact steps finds the statistics it needs.
    recipe = load_recipe(preset).setting("quantize_weights", rounding="gptq")
    recipe = recipe.model_copy(update={"calibration": CalibrationOptions(window=64, windows=2)})
    optimize(llama_artifact, recipe, tmp_path / "after", quality_tokens=0)
    located_losses = losses(llama_artifact, tmp_path / "after", tokens=64, window=32, restore=False)
    local_errors = [product.local for product in located_losses.products if product.local > 0]
    # Six or seven products in each of two layers; what w4a4 splits off the inputs stays in floats, with an error of 0.
    assert len(local_errors) >= 2 * 6
    # Four bits leave 10% of a normal distribution, and inputs of four bits as much again; 1 is noise.
    assert max(local_errors) < 0.5


def test_a_recipe_is_fitted_to_the_graph_but_one_of_a_manifest_is_not(llama_artifact: Path, tmp_path: Path) -> None:
    source = artifact.read(llama_artifact)
    fit = Compilation(source, "int4-rtn", work=tmp_path)
    assert [step.name for step in fit.recipe_for_target.steps] != [step.name for step in fit.recipe.steps]
    assert fit.recipe.steps[-1].name in ("lower", "compact_scales")
    replay = Compilation(source, fit.recipe_for_target.model_dump(mode="json"), work=tmp_path)
    assert replay.recipe == fit.recipe_for_target


def test_a_target_is_that_of_the_recipe_and_of_its_passes(llama_artifact: Path, tmp_path: Path) -> None:
    compilation = Compilation(llama_artifact, "int4-rtn", "ort-cuda", work=tmp_path)
    assert compilation.recipe.target == compilation.context.target == "ort-cuda"


def test_a_manifest_whose_recipe_is_none_is_refused(llama_artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the recipe in the manifest cannot be used"):
        Compilation(llama_artifact, {"name": "x", "steps": [{"step": "melt"}]}, work=tmp_path)


def test_steps_of_caches_are_refused_where_there_are_none(bert_artifact: Path, tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"name": "kv", "steps": [{"step": "canonicalize"}, {"step": "quantize_kv"}]})
    with pytest.raises(InputError, match="quantize_kv of the recipe kv is for a cache"):
        Compilation(bert_artifact, recipe, work=tmp_path)


def test_runs_of_a_pass_are_counted_over_all_calls(llama_artifact: Path, tmp_path: Path) -> None:
    compilation = Compilation(llama_artifact, "int4-rtn", work=tmp_path)
    lift = compilation.of_phases("lift")
    compilation.apply_unchecked(lift)
    compilation.apply_unchecked(lift)
    assert [report.run for report in compilation.reports if report.name == "canonicalize"] == [1, 2]
    assert artifact.read(llama_artifact).model.graph.num_nodes() == compilation.source.model.graph.num_nodes()
