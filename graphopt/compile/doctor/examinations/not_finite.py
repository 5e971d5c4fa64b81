"""Outputs that are NaN or infinite."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from graphopt.compile.doctor.examination import Examination, Patient, Symptom
from graphopt.graph.diagnostics import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

WRONG = Rule("doctor.not-finite", "{share:.1%} of what it computes is NaN or infinite, on {samples}")


class NotFinite(Examination):
    """The file runs, and its outputs are no numbers: an overflow in float16, a division by zero, a damaged weight."""

    name: ClassVar[str] = "not-finite"
    remedy: ClassVar[str] = "graphopt diff with the file that it was made from; float16 may be too narrow for it"
    runs: ClassVar[bool] = True

    def find(self, patient: Patient) -> Iterator[Symptom]:
        """Run it."""
        numbers = patient.probe.run(patient.session)
        share = 1 - float(np.isfinite(numbers).mean())
        if share:
            outputs = [value for value in patient.model.graph.outputs if value.name]
            yield self.symptom(WRONG(share=share, samples=patient.probe.tokens), outputs)
