"""Weights and computations in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphopt.analysis.structure.doubles import double_casts, double_weights
from graphopt.compile.doctor.examination import Examination, Patient, Symptom
from graphopt.graph.diagnostics import Rule
from graphopt.passes.lift.single_precision import why_not

if TYPE_CHECKING:
    from collections.abc import Iterator

DOUBLE = Rule("doctor.doubles", "{weights} constants of float64, {bytes} bytes, and {casts} casts to it")


class Doubles(Examination):
    """A CPU computes half as many numbers of float64 at a time, and onnxruntime has no fused kernels for them."""

    name: ClassVar[str] = "float64"
    remedy: ClassVar[str] = "the pass single_precision stores and computes float32, measured"
    steps: ClassVar[tuple[str, ...]] = ("single_precision",)

    def find(self, patient: Patient) -> Iterator[Symptom]:
        """Read the types of constants and casts."""
        weights, casts = double_weights(patient.model), double_casts(patient.model)
        if not weights and not casts:
            return
        size = sum(value.const_value.nbytes for value in weights if value.const_value is not None)
        stays = why_not(patient.model) is not None
        fact = DOUBLE(weights=len(weights), bytes=size, casts=len(casts))
        reduction = 0 if stays else size // 2
        yield self.symptom(fact, [*weights, *casts], bytes_saved=reduction, steps=[] if stays else None)
