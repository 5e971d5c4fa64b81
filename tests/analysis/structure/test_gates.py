"""Which products make nothing but decays and step sizes of recurrences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from graphopt.analysis.structure.products import gate_nodes
from tests.graphs import run_pass

GATES = {
    "qwen3_next": ["model.layers.0.linear_attn.in_proj_ba"],
    "mamba": ["backbone.layers.0.mixer"],  # dt_proj, with the weight on the left
    "mamba2": [],  # one matrix makes gates, keys, values and queries
    "lfm2": [],  # no recurrence
}


@pytest.mark.parametrize("family", GATES)
def test_gates_of_families(family: str, make_artifact: Callable[[str], Path]) -> None:
    graph = ir.load(make_artifact(family) / "model.onnx").graph
    assert sorted((node.name or "").rpartition(".")[0] for node in gate_nodes(graph)) == GATES[family]


def test_gates_stay_in_floats_unless_they_are_named(make_artifact: Callable[[str], Path]) -> None:
    name = "model.layers.0.linear_attn.in_proj_ba"
    for matrices, code in (({}, "gate"), ({f"{name}.weight": {"format": "int8", "group": 128}}, "thin")):
        model = ir.load(make_artifact("qwen3_next") / "model.onnx")
        report = run_pass(model, "quantize_weights", matrices=matrices)
        assert [(skip.where, skip.reason.code) for skip in report.skips if "in_proj_ba" in skip.where] == [
            (f"{name}.MatMul", f"quantize_weights.{code}")
        ]
