"""Large products in floats in a file whose other products are quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphopt.analysis.structure.contrib import contrib_nodes
from graphopt.analysis.structure.product_codes import coded_nodes
from graphopt.analysis.structure.products import linear_nodes, packed_nodes
from graphopt.compile.doctor.examination import Examination, Patient, Symptom
from graphopt.graph.diagnostics import Rule
from graphopt.graph.weights import weight_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

FLOATS = Rule(
    "doctor.float-products",
    "{count} products are in floats beside {quantized} quantized ones: {bytes} bytes, {share:.0%} of all weights",
)

_SMALLEST, _SHARE = 1 << 16, 0.05


class FloatProducts(Examination):
    """A file that is called quantized may hold most of its bytes in layers that no quantizer touched."""

    name: ClassVar[str] = "float-products"
    remedy: ClassVar[str] = (
        "if that was not meant: graphopt optimize FILE -r int4-rtn, which lists what it leaves and why"
    )

    def find(self, patient: Patient) -> Iterator[Symptom]:
        """Count bytes."""
        graph = patient.model.graph
        product_count = quantized_count(graph)
        nodes = [node for node in linear_nodes(graph) if _size_of(node) >= _SMALLEST]
        size, total = sum(map(_size_of, nodes)), weight_bytes(graph)
        if product_count and nodes and size >= _SHARE * total:
            yield self.symptom(FLOATS(count=len(nodes), quantized=product_count, bytes=size, share=size / total), nodes)


def quantized_count(graph: ir.Graph) -> int:
    """Return how many products of a graph have codes."""
    return len(coded_nodes(graph)) + len(packed_nodes(graph)) + len(contrib_nodes(graph, "MatMulNBits"))


def weight_bytes(graph: ir.Graph) -> int:
    """Return the bytes of all constants of a graph."""
    return sum(value.const_value.nbytes for value in graph.initializers.values() if value.const_value is not None)


def _size_of(node: ir.Node) -> int:
    weight = weight_of(node, 1)
    return 0 if weight is None or weight.const_value is None else weight.const_value.nbytes
