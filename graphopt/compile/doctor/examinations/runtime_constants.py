"""Constants that are computed each time that the file is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphopt.analysis.structure.constant_parts import constant_results
from graphopt.compile.doctor.examination import Examination, Patient, Symptom
from graphopt.graph.diagnostics import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPUTATION = Rule(
    "doctor.runtime-constants", "{nodes} nodes compute {count} constants of {bytes} bytes anew for each session"
)

_SMALLEST = 4096
# What moves numbers and computes none, as exporters take a weight out of a stack.
_REARRANGE = frozenset(("Split", "Slice", "Gather", "Concat", "Transpose"))
_REARRANGE |= {"Squeeze", "Unsqueeze", "Reshape", "Flatten"}


class RuntimeConstants(Examination):
    """What depends on constants alone is computed when a session opens, and then held beside what it was made of."""

    name: ClassVar[str] = "runtime-constants"
    remedy: ClassVar[str] = "the pass fold_constants computes them once"
    steps: ClassVar[tuple[str, ...]] = ("fold_constants",)

    def find(self, patient: Patient) -> Iterator[Symptom]:
        """Follow constants through nodes."""
        results = [
            result
            for result in constant_results(patient.model.graph)
            if result.source_bytes >= _SMALLEST and any(node.op_type not in _REARRANGE for node in result.nodes)
        ]
        nodes = list(dict.fromkeys(node for result in results for node in result.nodes))
        if nodes:
            size = sum(result.source_bytes for result in results)
            yield self.symptom(COMPUTATION(nodes=len(nodes), count=len(results), bytes=size), nodes)
