"""Casts that undo one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphopt.analysis.structure.cast_circles import cast_circles
from graphopt.compile.doctor.examination import Examination, Patient, Symptom
from graphopt.graph.diagnostics import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

CIRCLES = Rule("doctor.cast-circles", "{count} casts give numbers back the type that they had")


class CastCircles(Examination):
    """Numbers are cast to a wider type and back: two copies for nothing."""

    name: ClassVar[str] = "cast-circles"
    remedy: ClassVar[str] = "the pass canonicalize reads what was there before"
    steps: ClassVar[tuple[str, ...]] = ("canonicalize",)

    def find(self, patient: Patient) -> Iterator[Symptom]:
        """Follow casts."""
        nodes = cast_circles(patient.model.graph)
        if nodes:
            yield self.symptom(CIRCLES(count=len(nodes)), nodes)
