"""Recurrences that step through tokens one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphopt.compile.doctor.examination import Examination, Patient, Symptom
from graphopt.graph.diagnostics import Rule
from graphopt.passes.lift.canonicalize import Canonicalize
from graphopt.runtime_ops import DOMAIN

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

LOOP = Rule("doctor.loops", "{count} of {operators} run a subgraph for each token of a linear recurrence")


class Loops(Examination):
    """``Scan`` and ``Loop`` call all nodes of their body for each token; a linear recurrence has a kernel."""

    name: ClassVar[str] = "recurrence-in-loop"
    remedy: ClassVar[str] = "the pass canonicalize makes LinearRecurrence of them, which takes many tokens at once"
    steps: ClassVar[tuple[str, ...]] = ("canonicalize",)
    runs: ClassVar[bool] = True

    def find(self, patient: Patient) -> Iterator[Symptom]:
        """Let canonicalize look at a copy: what their steps compute is found out by running them."""
        loops = _loops(patient.model.graph)
        if not loops:
            return
        copy = patient.model.clone()
        Canonicalize()(copy)
        count = sum((node.domain, node.op_type) == (DOMAIN, "LinearRecurrence") for node in copy.graph)
        before = sum((node.domain, node.op_type) == (DOMAIN, "LinearRecurrence") for node in patient.model.graph)
        if count > before:
            kinds = sorted({node.op_type for node in loops})
            yield self.symptom(LOOP(count=count - before, operators=kinds), loops)


def _loops(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if not node.domain and node.op_type in ("Scan", "Loop")]
