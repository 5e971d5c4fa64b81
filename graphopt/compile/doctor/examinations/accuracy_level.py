"""Products with codes that multiply floats."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphopt.compile.doctor.examination import Examination, Patient, Symptom
from graphopt.graph.diagnostics import Rule
from graphopt.passes.lower.accuracy_level import slow_products

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOW = Rule(
    "doctor.accuracy-level",
    "{count} of MatMulNBits without accuracy_level=4: {megabytes:.1f} MB of floats are decoded in each run",
)


class AccuracyLevelIsMissing(Examination):
    """``MatMulNBits`` decodes its weight to float32 and multiplies floats, unless the node says otherwise."""

    name: ClassVar[str] = "accuracy-level"
    remedy: ClassVar[str] = "the pass accuracy_level lets a CPU multiply bytes"
    steps: ClassVar[tuple[str, ...]] = ("accuracy_level",)

    def find(self, patient: Patient) -> Iterator[Symptom]:
        """Read the attributes of products."""
        nodes = slow_products(patient.model.graph)
        if nodes:
            numbers = sum(node.attributes.get_int("K", 0) * node.attributes.get_int("N", 0) for node in nodes)
            yield self.symptom(SLOW(count=len(nodes), megabytes=4 * numbers / 1e6), nodes)
