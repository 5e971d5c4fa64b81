"""Experts in floats in a file whose other products are quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphopt.compile.doctor.examination import Examination, Patient, Symptom
from graphopt.compile.doctor.examinations.float_products import quantized_count, weight_bytes
from graphopt.graph.diagnostics import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

EXPERTS = Rule(
    "doctor.float-experts",
    "{count} stacks of matrices, as experts have them, are in floats beside {quantized} quantized products: {bytes} "
    "bytes, {share:.0%} of all weights",
)

_SMALLEST, _RANK = 1 << 16, 3


class FloatExperts(Examination):
    """Quantizers that look for matrices pass over stacks [experts, K, N], which hold most of a mixture's weights."""

    name: ClassVar[str] = "float-experts"
    remedy: ClassVar[str] = (
        "graphopt optimize FILE -r int4-rtn: canonicalize takes stacks apart where it knows the form"
    )

    def find(self, patient: Patient) -> Iterator[Symptom]:
        """Count bytes of stacks that products, lookups and mixtures read."""
        graph = patient.model.graph
        product_count = quantized_count(graph)
        stacks = [value for value in graph.initializers.values() if _is_stack(value)]
        if not product_count or not stacks:
            return
        size, total = sum(v.const_value.nbytes for v in stacks if v.const_value is not None), weight_bytes(graph)
        fact = EXPERTS(count=len(stacks), quantized=product_count, bytes=size, share=size / total)
        yield self.symptom(fact, stacks)


def _is_stack(value: ir.Value) -> bool:
    tensor = value.const_value
    if tensor is None or not tensor.dtype.is_floating_point() or len(tensor.shape) != _RANK:
        return False
    readers = {use.node.op_type for use in value.uses()}
    return tensor.nbytes >= _SMALLEST and bool(readers & {"MatMul", "Gather", "Split", "Slice", "MoE"})
