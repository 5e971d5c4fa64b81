"""The loop that `optimize` and `verify` share: runs are counted on, reports are found by their run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.errors import VerificationError
from graphopt.graph.diagnostics import Check, Effect, PassReport
from graphopt.graph.weights import Inline, Scale, own_input, rewrite
from graphopt.ort.runner import Runner
from graphopt.passes.base import Pass
from graphopt.passes.context import Context, make_context
from graphopt.passes.phases import Phase
from graphopt.tasks import task_of
from graphopt.verification.equivalence import RAN_TOGETHER, SAME_GRAPH, TOLERANCE, Verifier
from graphopt.verification.steps import Checks, by_run, is_same_graph, run_passes
from tests.facts import SENTENCE
from tests.graphs import residual_model


class Rename(Pass):
    """Rename the first node."""

    name: ClassVar[str] = "rename"
    effect: ClassVar[Effect] = "exact"

    @classmethod
    def phase(cls) -> Phase:
        return "algebra"

    def rewrite(self, model: ir.Model, context: Context) -> None:
        model.graph[0].name = f"{model.graph[0].name}'"
        context.ledger.changed(model.graph[0], SENTENCE(text="renamed"))


class ScaleHead(Rename):
    """Scale the head, and with it all logits."""

    factor: float

    def rewrite(self, model: ir.Model, context: Context) -> None:
        if self.factor == 1:
            return
        weight = own_input(next(node for node in model.graph if node.name == "head"), 1)
        assert weight.const_value is not None
        factors = Inline.from_array(np.full(weight.const_value.shape.numpy()[0], self.factor))
        rewrite(weight, partial(Scale, factors=factors, axis=0))
        context.ledger.changed(weight, SENTENCE(text="scaled"))


def scale_head(factor: float, name: str, effect: Effect = "exact") -> Pass:
    """Return a pass that scales the head; the name says which of several it is."""
    kind = type(name, (ScaleHead,), {"name": name, "effect": effect, "__module__": __name__})
    scale: Pass = kind(factor=factor)
    return scale


class Runs:
    """Passes on a small model, checked as a compilation checks them; counts sessions."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.open_count = 0
        self.model, self.verifier = residual_model(), Verifier(folder, {})
        open_file = Runner.open

        def count_open(runner: Runner, path: Path, **options: Any) -> Any:
            self.open_count += 1
            return open_file(runner, path, **options)

        patch.setattr(Runner, "open", count_open)
        self.verifier.start(self.model)

    def check(self, passes: Sequence[Pass]) -> list[Check]:
        context = make_context(task_of(self.model.graph))
        with Checks(self.verifier, lambda stage: None) as checks:
            for run in run_passes(
                self.model, passes, context, on_pass=lambda step: checks.check_before(step, self.model)
            ):
                checks.check_behind(run, run.report.claims)
            return checks.finish(self.model)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path, monkeypatch)


def test_exact_passes_in_a_row_are_run_once_and_the_record_says_so(runs: Runs) -> None:
    passes = [scale_head(1 + 1e-5, "first"), Rename(), scale_head(1.5, "lossy", "lossy")]
    checks = runs.check([*passes, scale_head(1 + 1e-5, "second"), scale_head(1, "third")])
    assert [check.after for check in checks] == ["first", "rename", "lossy", "second", "third"]
    assert {check.status for check in checks} == {"measured"}
    # before, behind two exact passes, behind the lossy one, behind the last two
    assert runs.open_count == 4
    assert [check.reason.code == RAN_TOGETHER.code for check in checks] == [True, True, False, True, True]
    assert checks[0].reason.figures["passes"] == ["first", "rename"]
    assert [check.figures["largest_change"] for check in checks] == pytest.approx(
        [1e-5, 1e-5, 0.5, 1e-5, 1e-5], rel=0.1
    )


@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_the_pass_at_fault_is_named_wherever_it_stands_in_the_row(runs: Runs, position: int) -> None:
    passes: list[Pass] = [scale_head(1 + 1e-6, f"right {number}") for number in range(3)]
    passes.insert(position, scale_head(1 + 3 * TOLERANCE, "wrong"))
    with pytest.raises(VerificationError, match=r"the pass wrong is exact, but it moved the logits by 3\.0e-04"):
        runs.check(passes)


def test_a_pass_that_breaks_the_model_is_found_behind_a_row_that_cannot_be_run(runs: Runs) -> None:
    with pytest.raises(VerificationError, match="NaN or infinite.*node=wrong"):
        runs.check([scale_head(1 + 1e-6, "right"), scale_head(np.inf, "wrong"), scale_head(1 + 1e-6, "next")])


def test_a_fault_in_front_of_a_lossy_pass_is_found_before_that_works(runs: Runs) -> None:
    names: list[str] = []

    class Lossy(Rename):
        name: ClassVar[str] = "lossy"
        effect: ClassVar[Effect] = "lossy"

        def rewrite(self, model: ir.Model, context: Context) -> None:
            names.append(self.name)

    with pytest.raises(VerificationError, match="the pass wrong"):
        runs.check([scale_head(1.1, "wrong"), Lossy()])
    assert not names


def test_roundings_that_add_up_to_more_than_one_are_judged_pass_by_pass(runs: Runs) -> None:
    share = 0.6 * TOLERANCE
    checks = runs.check([scale_head(1 + share, "first"), scale_head(1 + share, "second")])
    # float32 rounding of a weight is 6e-8, and of a sum of 16 products 16 times that
    assert [check.figures["largest_change"] for check in checks] == pytest.approx([share, share], abs=1e-6)


def test_what_was_left_as_it_was_is_not_run_again(runs: Runs) -> None:
    checks = runs.check([scale_head(1.5, "lossy", "lossy"), scale_head(1, "nothing"), scale_head(1, "to do", "lossy")])
    assert runs.open_count == 2
    assert [check.reason.code for check in checks[1:]] == [SAME_GRAPH.code] * 2
    assert [check.figures["largest_change"] for check in checks[1:]] == [0, 0]
    # figures from the start are those of the model that was run
    assert checks[2].figures["largest_change_from_start"] == checks[0].figures["largest_change_from_start"]


def test_graphs_are_the_same_in_every_node_port_and_weight() -> None:
    model = residual_model()
    assert is_same_graph(model, model.clone())
    for change in (
        lambda copy: setattr(copy.graph[0], "op_type", "Identity"),
        lambda copy: copy.graph[0].attributes.add(ir.AttrInt64("axis", 1)),
        lambda copy: copy.graph.remove(copy.graph[-1]),
        lambda copy: copy.graph[1].replace_input_with(0, copy.graph.inputs[0]),
        lambda copy: setattr(copy.graph.inputs[0], "type", ir.TensorType(ir.DataType.INT32)),
        lambda copy: copy.graph.initializers.pop(next(iter(copy.graph.initializers))),
        lambda copy: setattr(next(iter(copy.graph.initializers.values())), "const_value", ir.tensor(np.zeros(3))),
        lambda copy: copy.opset_imports.update({"": 24}),
    ):
        copy = model.clone()
        change(copy)
        assert not is_same_graph(model, copy)


def test_each_pass_is_announced_run_and_numbered_and_the_model_before_is_kept() -> None:
    model, announcements = residual_model(), []
    name = model.graph[0].name
    earlier = [PassReport(name="rename", effect="exact"), PassReport(name="other", effect="exact")]
    steps = [Rename() for _ in range(2)]
    pass_runs = list(
        run_passes(
            model,
            steps,
            make_context(task_of(model.graph)),
            earlier=earlier,
            on_pass=lambda step: announcements.append((step, model.graph[0].name)),
        )
    )
    assert announcements == [(steps[0], name), (steps[1], f"{name}'")]
    assert [run.report.run for run in pass_runs] == [2, 3]
    assert [run.before.graph[0].name for run in pass_runs] == [name, f"{name}'"]
    assert all(run.after is model for run in pass_runs)


def test_reports_are_found_by_their_run_where_they_are_not_numbered_too() -> None:
    first, second, lowering = (PassReport(name=name, effect="exact") for name in ("rotate", "rotate", "lower"))
    report_by_run = by_run([first, lowering, second])
    assert report_by_run["rotate", 1] is first
    assert report_by_run["rotate", 2] is second
    assert report_by_run["lower", 1] is lowering
