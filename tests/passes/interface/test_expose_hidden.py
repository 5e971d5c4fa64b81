"""The last hidden state as an output: it is what the lm_head reads, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.analysis.structure.ports import HIDDEN, LOGITS
from graphopt.compile.pipeline import optimize
from graphopt.inference.session import load
from graphopt.passes.codes.quantize_weights import LinearFormat, QuantizeWeights
from tests.graphs import VOCABULARY, residual_model, run_pass, session


def both(model: ir.Model, folder: Path) -> list[np.ndarray]:
    """Return logits and, where there are, hidden states of random tokens."""
    opened = session(model, folder)
    ids = np.random.default_rng(1).integers(0, VOCABULARY, (3, 5))
    return list(opened.run([port.name for port in opened.get_outputs()], {"input_ids": ids}))


@pytest.mark.parametrize("given", [{}, {"biases": True}, {"tied": True}])
def test_the_state_is_what_the_lm_head_reads(given: dict[str, Any], tmp_path: Path) -> None:
    model = residual_model(**given)
    (before,) = both(model, tmp_path / "before")
    report = run_pass(model, "expose_hidden")
    assert [str(change.what) for change in report.changes] == [
        "final_norm.out, which head reads, is the output last_hidden_state"
    ]
    after, hidden = both(model, tmp_path / "after")
    assert np.array_equal(before, after)
    weights = {name: value.const_value for name, value in model.graph.initializers.items()}
    matrix = weights["table"].numpy().T if "tied" in given else weights["head.weight"].numpy()  # type: ignore[union-attr]
    bias = weights["head.bias"].numpy() if "biases" in given else 0  # type: ignore[union-attr]
    # sums of 16 numbers in another order
    assert np.abs(hidden @ matrix + bias - after).max() < 1e-6 * np.abs(after).max()


def test_positions_that_are_cut_have_no_state(tmp_path: Path) -> None:
    model = residual_model()
    run_pass(model, "last_logits", positions=2)
    run_pass(model, "expose_hidden")
    logits, hidden = both(model, tmp_path)
    assert (logits.shape, hidden.shape) == ((3, 2, VOCABULARY), (3, 2, 16))


def test_a_head_of_codes_has_a_state_too(tmp_path: Path) -> None:
    model = residual_model(width=32)
    QuantizeWeights(linear=None, lm_head=LinearFormat(format="nf4", group=16))(model)
    (before,) = both(model, tmp_path / "before")
    run_pass(model, "expose_hidden")
    after, hidden = both(model, tmp_path / "after")
    assert np.array_equal(before, after)
    assert hidden.shape == (3, 5, 32)


def test_a_recipe_adds_it_behind_a_rotation_and_soft_caps(make_artifact: Callable[[str], Path], tmp_path: Path) -> None:
    from graphopt.inference.decoding.proposers.heads import lm_head_matrix
    from graphopt.passes.recipe import load_recipe

    recipe = load_recipe("rotate", add=["expose_hidden"])
    made = optimize(make_artifact("gemma2"), recipe, tmp_path / "out", quality_tokens=0)
    assert "expose_hidden" in [report.name for report in made.manifest.passes]
    opened = load(tmp_path / "out", threads=1)
    assert opened.interface.gives_hidden
    ids = np.array([[3, 1, 4, 1, 5]])
    feeds = opened.interface.feeds(ids, np.ones_like(ids), opened.interface.empty_past(1))
    logits, hidden = opened.inference.run([LOGITS, HIDDEN], feeds)
    capped = 30 * np.tanh(hidden @ lm_head_matrix(opened) / 30)  # final_logit_softcapping of the family
    # float32 products of 64 numbers, by two libraries
    assert np.abs(capped - logits).max() < 1e-5 * np.abs(logits).max()


def reasons(model: ir.Model) -> list[str]:
    return [str(skip.reason) for skip in run_pass(model, "expose_hidden").skips]


def test_a_second_time_changes_nothing() -> None:
    model = residual_model()
    assert reasons(model) == []
    assert reasons(model) == ["last_hidden_state, which the lm_head reads, is an output already"]
    assert len(model.graph.outputs) == 2


def test_graphs_without_one_product_are_left_alone() -> None:
    model = residual_model()
    output = model.graph.outputs[0]
    shape = ir.node("Softmax", [output], {"axis": 1}, name="mixed")
    made = shape.outputs[0]
    made.shape, made.dtype = output.shape, output.dtype
    output.name, made.name = "scores", LOGITS
    model.graph.append(shape)
    model.graph.outputs[0] = made
    assert reasons(model) == ["Softmax mixed stands behind the product that makes the logits"]

    model = residual_model()
    x = model.graph.node("head").inputs[0]
    assert x is not None
    second = ir.node("MatMul", [x, model.graph.initializers["head.weight"]], name="second")
    added = ir.node("Add", [model.graph.outputs[0], second.outputs[0]], name="sum")
    model.graph.extend([second, added])
    model.graph.outputs[0].name, added.outputs[0].name = "first", LOGITS
    model.graph.outputs[0] = added.outputs[0]
    assert reasons(model) == ["2 products make the logits: head, second"]

    model = residual_model()
    model.graph.outputs[0].name = "scores"
    assert reasons(model) == ["the graph has no output of this name"]

    model = residual_model()
    model.graph.node("head").inputs[0].shape = None  # type: ignore[union-attr]
    assert reasons(model) == ["final_norm.out is not known to be floats [batch, length, width]"]

    model = residual_model()
    model.graph.node("embedding").outputs[0].name = HIDDEN
    assert reasons(model) == ["the graph has another tensor called last_hidden_state"]

    model = residual_model()
    model.graph.outputs[0].name = "scores"
    cast = ir.node("Cast", [model.graph.inputs[0]], {"to": 1}, name="ids")
    cast.outputs[0].name = LOGITS
    model.graph.append(cast)
    model.graph.outputs[0] = cast.outputs[0]
    assert reasons(model) == ["no product with a matrix makes the logits"]
