"""The loop that `optimize` and `verify` share: runs are counted on, reports are found by their run."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from graphopt.checks.steps import by_run, run_passes
from graphopt.facts import TEXT, Effect, PassReport
from graphopt.passes.base import Pass, StepOptions
from graphopt.passes.context import Context, Surroundings
from graphopt.passes.phases import Phase
from graphopt.tasks import task_of
from tests.graphs import residual_model


class Rename(Pass[StepOptions]):
    """Rename the first node."""

    name: ClassVar[str] = "rename"
    effect: ClassVar[Effect] = "exact"
    options_type: ClassVar[type[StepOptions]] = StepOptions

    @classmethod
    def phase(cls) -> Phase:
        return "algebra"

    def rewrite(self, model: ir.Model, context: Context) -> None:
        model.graph[0].name = f"{model.graph[0].name}'"
        context.ledger.changed(model.graph[0], TEXT(text="renamed"))


def test_each_pass_is_announced_run_and_numbered_and_the_model_before_is_kept() -> None:
    model, announced = residual_model(), []
    name = model.graph[0].name
    earlier = [PassReport(name="rename", effect="exact"), PassReport(name="other", effect="exact")]
    steps = [Rename(StepOptions(step="rename")) for _ in range(2)]
    ran = list(
        run_passes(
            model,
            steps,
            Surroundings(task_of(model.graph)),
            earlier=earlier,
            on_pass=lambda step: announced.append((step, model.graph[0].name)),
        )
    )
    assert announced == [(steps[0], name), (steps[1], f"{name}'")]
    assert [each.report.run for each in ran] == [2, 3]
    assert [each.before.graph[0].name for each in ran] == [name, f"{name}'"]
    assert all(each.after is model for each in ran)


def test_reports_are_found_by_their_run_where_they_are_not_numbered_too() -> None:
    first, second, other = (PassReport(name=name, effect="exact") for name in ("rotate", "rotate", "lower"))
    found = by_run([first, other, second])
    assert found["rotate", 1] is first
    assert found["rotate", 2] is second
    assert found["lower", 1] is other
