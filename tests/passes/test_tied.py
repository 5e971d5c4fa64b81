"""A model whose token embedding is tied to its lm_head, through whole recipes: one set of codes; all checks hold."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.artifact.artifact import MODEL
from graphopt.compile.pipeline import optimize
from graphopt.compile.replay import verify
from graphopt.inference.session import load
from graphopt.passes.recipe import load_recipe

VOCABULARY, HIDDEN = 300, 64  # of the Llama


def kinds(folder: Path) -> Counter[str]:
    return Counter(node.op_type for node in ir.load(folder / MODEL).graph)


@pytest.mark.parametrize(
    ("recipe", "given", "lookup"),
    [
        ("int4-rtn", {}, "Gather"),
        ("int4-rtn", {"target": "ort-cuda"}, "GatherTable"),
        ("fp6-rtn", {}, "GatherTable"),
        ("w4a8-rtn", {"target": "ort-cpu:avx512"}, "GatherTable"),
    ],
)
def test_one_set_of_codes_saves_the_embedding_and_verifies(
    llama_artifact: Path, tmp_path: Path, recipe: str, given: dict[str, Any], lookup: str
) -> None:
    sizes = []
    for tied in (False, True):
        chosen = load_recipe(recipe, options=[f"quantize_weights.tied={tied}"])
        made = optimize(llama_artifact, chosen, tmp_path / f"{tied}", quality_tokens=0, **given)
        assert made.manifest.weights is not None
        sizes.append(made.manifest.weights)
    apart, once = sizes
    # 8 bits of the embedding are gone, and its float scale a row
    assert apart.bytes - once.bytes == VOCABULARY * (HIDDEN + 4)
    assert apart.parameters - once.parameters == VOCABULARY * HIDDEN
    assert ("GatherTable" in kinds(tmp_path / "True")) == (lookup == "GatherTable")
    statuses = {check.status for check in verify(llama_artifact, tmp_path / "True").checks}
    assert "failed" not in statuses


def test_in_float16_the_lookup_is_cast(llama_artifact: Path, tmp_path: Path) -> None:
    optimize(llama_artifact, "fp6-rtn", tmp_path / "out", quality_tokens=0, float16=True, last_logits=True)
    nodes = list(ir.load(tmp_path / "out" / MODEL).graph)
    (lookup,) = [node for node in nodes if node.op_type == "GatherTable"]
    assert [use.node.op_type for use in lookup.outputs[0].uses()] == ["Cast"]
    load(tmp_path / "out")  # onnxruntime takes the types


def test_a_tied_model_computes_what_one_that_is_stored_twice_does(llama_artifact: Path, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, 16))
    found = []
    for tied in (False, True):
        options = [f"quantize_weights.tied={tied}", "quantize_weights.activations=float32"]
        optimize(llama_artifact, load_recipe("fp6-rtn", options=options), tmp_path / f"{tied}", quality_tokens=0)
        found.append(load(tmp_path / f"{tied}").logits(ids))
    # the embedding is rounded to FP6 instead of int8: 2^-4 of each number, and less of a logit
    assert 0 < np.abs(found[0] - found[1]).max() < 0.1 * np.abs(found[0]).max()


def test_caches_in_pages_and_a_second_recipe_leave_it_tied(llama_artifact: Path, tmp_path: Path) -> None:
    optimize(llama_artifact, load_recipe("fp6-rtn", add=["quantize_kv"]), tmp_path / "first", quality_tokens=0)
    assert kinds(tmp_path / "first")["GatherTable"] == 1
    made = optimize(tmp_path / "first", load_recipe("rotate"), tmp_path / "second", quality_tokens=0)
    assert [check.status for check in made.manifest.checks if check.name == "certificate"] == ["proved"]
    assert kinds(tmp_path / "second")["GatherTable"] == 1


def test_a_rotation_unties_them_and_is_proved(llama_artifact: Path, tmp_path: Path) -> None:
    made = optimize(llama_artifact, "rotate-int4-rtn", tmp_path / "out", quality_tokens=0)
    assert "proved" in [check.status for check in made.manifest.checks if check.name == "certificate"]
    assert "GatherTable" not in kinds(tmp_path / "out")
