from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights import own_input
from graphopt.ort.session import open_session
from graphopt.passes.recipe import load_recipe
from tests.graphs import VOCABULARY, residual_model, run_pass, save

IDS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 6))


def logits(model: ir.Model, folder: Path) -> np.ndarray:
    folder.mkdir()
    found: np.ndarray = open_session(save(model, folder)).run(["logits"], {"input_ids": IDS})[0]
    return found


def matrices(model: ir.Model) -> list[str | None]:
    """Return the initializers that have an entry for each token."""
    return [value.name for value in model.graph.initializers.values() if VOCABULARY in (value.shape or ())]


def test_a_tied_head_in_floats_is_stored_once_and_computes_the_same_bits(tmp_path: Path) -> None:
    model = residual_model(tied=True)
    run_pass(model, "canonicalize")
    assert len(matrices(model)) == 2
    before = logits(model, tmp_path / "before")
    report = run_pass(model, "tie_embedding")
    assert [change.what.code for change in report.changes] == ["tie_embedding.tied"]
    assert matrices(model) == ["table"]
    np.testing.assert_array_equal(logits(model, tmp_path / "after"), before)
    assert not run_pass(model, "tie_embedding").changes
    # and canonicalize takes it apart again for the next recipe
    run_pass(model, "canonicalize")
    assert len(matrices(model)) == 2


def test_a_head_that_is_another_matrix_stays() -> None:
    for model in (residual_model(), residual_model(tied=True)):
        run_pass(model, "canonicalize")
        head = next(node for node in model.graph if node.name == "head")
        weight = own_input(head, 1)
        assert weight.const_value is not None
        changed = weight.const_value.numpy().copy()
        changed[0, 0] += 1e-3
        weight.const_value = ir.tensor(changed, name=weight.name)
        assert not run_pass(model, "tie_embedding").changes
        assert len(matrices(model)) == 2


def test_float16_keeps_it_together(tmp_path: Path) -> None:
    model = residual_model(tied=True)
    run_pass(model, "canonicalize")
    before = logits(model, tmp_path / "before")
    run_pass(model, "tie_embedding")
    run_pass(model, "float16")
    assert matrices(model) == ["table"]
    # float16 has 11 bits; a few roundings in a row
    assert np.abs(logits(model, tmp_path / "after") - before).max() < 1e-2 * np.abs(before).max()


def test_recipes_that_leave_weights_alone_get_the_step() -> None:
    tied, apart = residual_model(tied=True).graph, residual_model().graph
    for name, expected in {"kv4": True, "streaming": True, "float16": True, "int4": False, "rotate": False}.items():
        recipe = load_recipe(name)
        steps = [step.name for step in recipe.fitting(tied).steps]
        assert ("tie_embedding" in steps) is expected
        assert "tie_embedding" not in [step.name for step in recipe.fitting(apart).steps]
        if name == "float16":
            assert steps.index("lower") < steps.index("tie_embedding") < steps.index("float16")
