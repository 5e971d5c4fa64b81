from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.errors import VerificationError
from graphopt.graph.weights import Inline, Scale, own_input, rewrite
from graphopt.ort import capacity as room
from graphopt.ort.session import ACCURACY_LEVEL
from graphopt.passes.lower.lower import lower_model
from graphopt.verification.equivalence import Verifier
from tests.graph.weights.counting import CountingExpression
from tests.graphs import residual_model, run_pass


def start_verifier(model: ir.Model, folder: Path) -> Verifier:
    verifier = Verifier(folder, {})
    verifier.start(model)
    return verifier


def scale_weight(model: ir.Model, name: str, factor: float) -> None:
    node = next(node for node in model.graph if node.name == name)
    weight = own_input(node, 1)
    assert weight.const_value is not None
    factors = np.full(weight.const_value.shape.numpy()[0], factor)
    rewrite(weight, partial(Scale, factors=Inline.from_array(factors), axis=0))


def test_nothing_changed_is_measured_as_nothing(tmp_path: Path) -> None:
    model = residual_model()
    check = start_verifier(model, tmp_path).check(model, "nothing", "exact")
    assert check.status == "measured"
    assert check.figures["largest_change"] == 0
    assert check.figures["same_first_choice_share"] == 1


@pytest.mark.parametrize("factor", [1 + 2e-3, 0.0])
def test_an_exact_pass_that_moves_the_logits_is_refused(tmp_path: Path, factor: float) -> None:
    model = residual_model()
    verifier = start_verifier(model, tmp_path)
    scale_weight(model, "head", factor)
    with pytest.raises(VerificationError, match="fold is exact, but it moved the logits by"):
        verifier.check(model, "fold", "exact")


def test_a_lossy_pass_is_measured_step_by_step_and_from_the_start(tmp_path: Path) -> None:
    model = residual_model()
    verifier = start_verifier(model, tmp_path)
    for step in (1, 2):
        scale_weight(model, "head", 1.1)
        figures = verifier.check(model, f"step {step}", "lossy").figures
        # all logits scale alike; float32 rounding of 1.1 w is 6e-8, and of a sum of 16 such products 16 times that
        assert figures["largest_change"] == pytest.approx(0.1, abs=1e-6)
        assert figures["largest_change_from_start"] == pytest.approx(1.1**step - 1, abs=1e-6)
        assert figures["divergence_from_start_nats"] > 0


@pytest.mark.parametrize(
    ("weights", "entries", "packs"),
    [("int4", {ACCURACY_LEVEL: "4"}, False), ("fp6-e2m3", {}, False), ("fp6-e2m3", {}, True)],
    ids=["onnxruntime rounds", "the graph rounds", "products round"],
)
@pytest.mark.parametrize("processors", [1, 2], ids=["one after the other", "beside one another"])
def test_an_exact_pass_is_compared_without_the_rounding_of_inputs(
    tmp_path: Path,
    weights: str,
    entries: dict[str, str],
    packs: bool,
    processors: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounding inputs to int8 makes a step of 1/127 of a difference in the last place, as sums in another order are."""
    monkeypatch.setattr(room, "processors", lambda: processors)
    model = residual_model(width=64, inner=32, layers=4)
    verifier = Verifier(tmp_path, entries)
    verifier.start(model)
    linear = {"format": weights, "group": 32}
    run_pass(model, "quantize_weights", linear=linear, lm_head=None, embedding=None, activations="int8")
    assert verifier.check(model, "quantize_weights", "lossy").figures["largest_change"] > 1e-2
    if packs:  # as in a model that was written and read again
        model = lower_model(model)
        assert not any(node.op_type == "RoundActivations" for node in model.graph)
        assert verifier.check(model, "lower", "exact").figures["largest_change"] == 0
    norm = next(node.name or "" for node in model.graph if node.op_type == "RMSNormalization")
    scale_weight(model, norm, 1 + 2e-5)
    # Four layers pass on what the first is off by; with inputs rounded to int8 it is more than an exact pass may do.
    change = verifier.check(model, "another order", "exact").figures["largest_change"]
    assert change < 8e-5
    assert verifier.check(model, "again", "lossy").figures["largest_change"] == 0
    scale_weight(model, norm, 1.002)
    with pytest.raises(VerificationError, match="is exact"):
        verifier.check(model, "broken", "exact")


@pytest.mark.parametrize("effect", ["exact", "lossy"])
def test_logits_that_are_not_finite_are_refused_from_any_pass(tmp_path: Path, effect: str) -> None:
    model = residual_model()
    verifier = start_verifier(model, tmp_path)
    scale_weight(model, "head", np.inf)
    with pytest.raises(VerificationError, match="NaN or infinite.*node=broken"):
        verifier.check(model, "broken", effect)  # type: ignore[arg-type]


def test_a_model_that_is_broken_from_the_start_is_refused(tmp_path: Path) -> None:
    model = residual_model()
    scale_weight(model, "head", np.nan)
    with pytest.raises(VerificationError, match="before any pass"):
        start_verifier(model, tmp_path)


def test_a_model_that_does_not_fit_is_not_covered_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "available_memory", lambda: 1000)
    model = residual_model()
    verifier = start_verifier(model, tmp_path)
    scale_weight(model, "head", 0.0)
    check = verifier.check(model, "fold", "exact")
    assert check.status == "not covered"
    assert "GB of memory" in str(check.reason)
    assert not list(tmp_path.iterdir())


def test_padding_and_a_cache_are_part_of_the_probe(llama_artifact: Path, tmp_path: Path) -> None:
    from graphopt.artifact import artifact
    from graphopt.tasks.causal_lm.interface import Interface
    from graphopt.tasks.causal_lm.probe import CausalProbe

    model = artifact.read(llama_artifact).model
    verifier = start_verifier(model, tmp_path)
    assert (CausalProbe.draw(Interface.of_graph(model.graph)).attention_mask == 0).sum() == 3
    # what an Attention that forgets its mask gets wrong shows only behind padding and in the second call
    for node in [node for node in model.graph if node.op_type == "Attention"]:
        node.replace_input_with(3, None)
        node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
    with pytest.raises(VerificationError):
        verifier.check(model, "forgetful", "exact")


def test_lazy_weights_are_computed_once_per_check(tmp_path: Path) -> None:
    model = residual_model()
    verifier = start_verifier(model, tmp_path)
    weight = own_input(next(node for node in model.graph if node.name == "up0"), 1)
    rewrite(weight, partial(CountingExpression, name=str(tmp_path)))
    verifier.check(model, "one", "exact")
    verifier.check(model, "two", "exact")
    assert CountingExpression.counts[str(tmp_path)] == 1
    # and the folder holds no model that was run, only what was evaluated
    assert [file.name for file in tmp_path.iterdir()] == ["weights"]
