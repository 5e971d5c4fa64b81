"""Products with codes whose zero points are floats."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from graphopt.compile.doctor.examination import Examination, Patient, Symptom
from graphopt.graph.diagnostics import Rule
from graphopt.graph.weights import weight_of
from graphopt.passes.lower.integer_zero_points import float_zero_points

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

FLOATS = Rule("doctor.float-zero-points", "{count} of MatMulNBits have zero points in floats, of {bits} bits")

_ZERO_POINTS = 3


class FloatZeroPoints(Examination):
    """``MatMulNBits`` has its fast kernels for zero points that are codes; others decode the weight in each run."""

    name: ClassVar[str] = "float-zero-points"
    remedy: ClassVar[str] = "the pass integer_zero_points packs those that are whole numbers; then accuracy_level"
    steps: ClassVar[tuple[str, ...]] = ("integer_zero_points", "accuracy_level")

    def find(self, patient: Patient) -> Iterator[Symptom]:
        """Read the types of zero points."""
        nodes = float_zero_points(patient.model.graph)
        if nodes:
            bits = sorted({node.attributes.get_int("bits", 4) for node in nodes})
            yield self.symptom(FLOATS(count=len(nodes), bits=bits), nodes, bytes_saved=sum(map(_bytes_saved, nodes)))


def _bytes_saved(node: ir.Node) -> int:
    zeros = weight_of(node, _ZERO_POINTS)
    assert zeros is not None
    assert zeros.const_value is not None
    bits, columns = node.attributes.get_int("bits", 4), node.attributes.get_int("N", 1)
    numbers = np.asarray(zeros.const_value.numpy(), np.float64)
    if not np.isin(numbers, np.arange(1 << bits)).all():
        return 0
    return zeros.const_value.nbytes - columns * -(-(numbers.size // columns) * bits // 8)
