"""Weights that are decoded as a whole in each run."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphopt.compile.doctor.examination import Examination, Patient, Symptom
from graphopt.graph.diagnostics import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

DECODING = Rule(
    "doctor.unfused-products",
    "{count} weights are decoded in each run, {megabytes:.1f} MB of floats: onnxruntime does not fuse their products",
)

_SMALLEST = 4096


class UnfusedProducts(Examination):
    """onnxruntime fuses ``DequantizeLinear -> MatMul`` in one layout, and not where a pattern of its own comes first.

    Codes that are transposed on the way hinder, a ``Relu`` behind the product, a ``DequantizeLinear`` in front of it.
    """

    name: ClassVar[str] = "unfused-products"
    remedy: ClassVar[str] = "the passes transpose_codes and lower write them as onnxruntime fuses them"
    steps: ClassVar[tuple[str, ...]] = ("canonicalize", "transpose_codes", "lower")
    runs: ClassVar[bool] = True

    def find(self, patient: Patient) -> Iterator[Symptom]:
        """Look for decodings of large constants in the graph that onnxruntime runs."""
        if not any(node.op_type == "DequantizeLinear" for node in patient.model.graph):
            return
        nodes = [node for node in patient.runtime_graph if _decodes_weight(node)]
        if nodes:
            sizes = (codes.shape.numpy() for node in nodes if (codes := node.inputs[0]) is not None and codes.shape)
            numbers = sum(rows * columns for rows, columns in sizes)
            yield self.symptom(DECODING(count=len(nodes), megabytes=4 * numbers / 1e6), nodes)


def _decodes_weight(node: ir.Node) -> bool:
    codes = node.inputs[0] if node.inputs else None
    tensor = None if codes is None or not codes.is_initializer() else codes.const_value
    if node.op_type != "DequantizeLinear" or tensor is None or len(tensor.shape) != 2 or tensor.size < _SMALLEST:
        return False
    waiting = [use.node for use in node.outputs[0].uses()]
    return any(reader.op_type in ("MatMul", "Gemm", "FusedMatMul", "Transpose", "FusedGemm") for reader in waiting)
