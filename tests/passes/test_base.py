from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

import onnx_ir as ir
import pytest

from graphopt.analysis.structure.heads import Calibration
from graphopt.errors import InputError
from graphopt.graph import provenance
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.passes import PASSES
from graphopt.passes.base import Pass
from graphopt.passes.context import Context, Statistics, make_context
from graphopt.tasks import task_of
from tests.graphs import residual_model, run_pass

LOOKED = Rule("tests.looked", "looked at")
LEFT = Rule("tests.left", "not today")


class Rename(Pass):
    """Do to a graph what a careless pass would."""

    name: ClassVar[str] = "rename"
    effect: ClassVar[Effect] = "exact"
    damage: str

    def rewrite(self, model: ir.Model, context: Context) -> None:
        ledger = context.ledger
        nodes = {node.name: node for node in model.graph}
        if self.damage == "two of a name":
            nodes["up0"].outputs[0].name = nodes["up1"].outputs[0].name
        else:
            ledger.changed(nodes["up0"], LOOKED(), [nodes["up1"]])
            ledger.skipped(nodes["up1"], LEFT())


def test_passes_share_what_their_compilation_has(tmp_path: Path) -> None:
    class Look(Pass):
        name: ClassVar[str] = "look"
        effect: ClassVar[Effect] = "exact"
        seen: ClassVar[list[Context]] = []

        def rewrite(self, model: ir.Model, context: Context) -> None:
            self.seen.append(context)

    model, look = residual_model(), Look()
    shared = make_context(task_of(model.graph), "ort-cpu")
    look(model, shared)
    look(model)
    first, alone = Look.seen
    assert (first.task, first.target) == (shared.task, "ort-cpu")
    assert first.runner is shared.runner
    assert first.statistics is shared.statistics
    assert (alone.task, alone.target) == (shared.task, "portable")
    assert alone.runner is not shared.runner
    assert first.ledger.report is not alone.ledger.report


def test_statistics_read_a_file_once_and_take_scores_as_they_are(tmp_path: Path) -> None:
    statistics, file = Statistics(), tmp_path / "heads.json"
    assert statistics.heads(None) is None
    with pytest.raises(InputError, match="the calibration cannot be read"):
        statistics.heads(file)
    calibration = Calibration(
        origin="0", model="m", tokens=1, window=1, queries=1, block=1, repeats=1, policies={}, layers=()
    )
    file.write_text(calibration.model_dump_json())
    scores = statistics.heads(file)
    file.unlink()
    assert statistics.heads(file) is scores is statistics.heads(scores)


def test_the_report_holds_changes_skips_and_time_and_the_node_its_history() -> None:
    model = residual_model()
    result = Rename(damage="none")(model)
    assert result.modified
    assert [(c.where, c.what) for c in result.report.changes] == [("up0", LOOKED())]
    assert [(s.where, s.reason) for s in result.report.skips] == [("up1", LEFT())]
    assert result.report.seconds > 0
    assert provenance.history(next(n for n in model.graph if n.name == "up0")) == (["rename"], ["up1"])


def test_a_pass_that_gives_two_values_one_name_is_stopped() -> None:
    with pytest.raises(ir.passes.PostconditionError, match="rename gave several values the same name"):
        Rename(damage="two of a name")(residual_model())


# The phase `importing` and `canonicalize` make a graph canonical.
@pytest.mark.parametrize(
    "name", [name for name, each in PASSES.items() if each.phase() != "importing" and name != "canonicalize"]
)
def test_a_graph_that_is_not_canonical_is_refused_with_what_to_do(name: str) -> None:
    model = residual_model()
    model.graph.opset_imports[""] = 18
    with pytest.raises(InputError, match=r"opset 23 to 26, it has 18.*`canonicalize` first"):
        run_pass(model, name)


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_documents_its_rewrite_and_knows_its_step(name: str) -> None:
    doc = PASSES[name].__doc__
    assert re.search(r"^ *before\b.*::$", doc, re.MULTILINE)  # it may say of which form
    assert "after" in doc
    assert PASSES[name]().model_dump()["step"] == name
