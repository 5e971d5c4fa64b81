from __future__ import annotations

import onnx_ir as ir

from graphopt import provenance
from tests.graphs import residual_model, run_pass


def test_passes_are_a_history_and_the_first_sources_stay() -> None:
    node = ir.node("MatMul", [], name="made")
    provenance.record(node, "one", ["a", "b", "a"])
    provenance.record(node, "two", ["c"])
    assert provenance.history(node) == (["one", "two"], ["a", "b"])


def test_what_no_pass_touched_has_no_history() -> None:
    assert provenance.history(ir.node("MatMul", [])) == ([], [])


def test_a_weight_says_all_passes_that_it_went_through() -> None:
    model = residual_model()
    for name in ("fold_norms", "rotate"):
        run_pass(model, name)
    assert provenance.history(model.graph.initializers["up0.weight"]) == (["fold_norms", "rotate"], ["norm0.gain"])
