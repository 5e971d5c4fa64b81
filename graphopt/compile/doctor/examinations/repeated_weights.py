"""Weights that are stored several times."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphopt.analysis.structure.repeated_weights import repeated_weights
from graphopt.compile.doctor.examination import Examination, Patient, Symptom
from graphopt.graph.diagnostics import Rule
from graphopt.graph.weights import source_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

REPETITION = Rule(
    "doctor.repeated-weights", "{count} weights are stored again, {bytes} bytes in all, such as {example}"
)

_SMALLEST = 4096


class RepeatedWeights(Examination):
    """The same bytes lie in the file under several names."""

    name: ClassVar[str] = "repeated-weights"
    remedy: ClassVar[str] = "the pass share_weights lets all nodes read one of them"
    steps: ClassVar[tuple[str, ...]] = ("share_weights",)

    def find(self, patient: Patient) -> Iterator[Symptom]:
        """Compare digests of weights."""
        copies: list[ir.Value] = []
        for first, equal_values in repeated_weights(patient.model):
            assert first.const_value is not None
            source = source_of(first.const_value)  # the same bytes of a file are stored once already
            copies += [x for x in equal_values if x.const_value is not None and source_of(x.const_value) != source]
        size = sum(value.const_value.nbytes for value in copies if value.const_value is not None)
        if size >= _SMALLEST:
            fact = REPETITION(count=len(copies), bytes=size, example=copies[0].name)
            yield self.symptom(fact, copies, bytes_saved=size)
