from __future__ import annotations

import onnx_ir as ir

from graphopt.graph import provenance
from graphopt.graph.provenance import HistoryStep
from tests.graphs import residual_model, run_pass


def test_every_step_is_kept_with_all_that_it_made_something_of() -> None:
    node = ir.node("MatMul", [], name="made")
    provenance.record(node, "one", ["a", "b", "a"])
    provenance.record(node, "two", ["c"])
    assert provenance.steps(node) == [HistoryStep("one", "made", ("a", "b")), HistoryStep("two", "made", ("c",))]
    assert provenance.history(node) == (["one", "two"], ["a", "b", "c"])


def test_what_is_made_of_several_takes_over_the_history_of_each() -> None:
    left, right = (ir.node("MatMul", [], name=name) for name in ("left side", "right"))
    provenance.record(left, "one", ["an old name", "b"])
    provenance.record(right, "one", ["c"])
    parts = [ir.node("Split", [], name=f"part {number}") for number in range(2)]
    for part in parts:
        provenance.record(part, "two", [left, right])
        assert provenance.steps(part) == [
            HistoryStep("one", "left side", ("an old name", "b")),
            HistoryStep("one", "right", ("c",)),
            HistoryStep("two", part.name or "", ("left side", "right")),
        ]
        assert provenance.history(part) == (["one", "two"], ["an old name", "b", "c"])


def test_an_edit_in_place_adds_one_step() -> None:
    node = ir.node("MatMul", [], name="up")
    for name in ("one", "two"):
        provenance.record(node, name, [node])
    assert provenance.steps(node) == [HistoryStep("one", "up", ("up",)), HistoryStep("two", "up", ("up",))]
    assert provenance.history(node) == (["one", "two"], ["up"])


def test_what_no_pass_touched_has_no_history() -> None:
    assert provenance.history(ir.node("MatMul", [])) == ([], [])


def test_a_weight_says_all_passes_that_it_went_through() -> None:
    model = residual_model()
    for name in ("fold_norms", "rotate"):
        run_pass(model, name)
    assert provenance.history(model.graph.initializers["up0.weight"]) == (["fold_norms", "rotate"], ["norm0.gain"])
