"""What products of a graph read."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graphopt.analysis.structure.products import reads_codes


@pytest.mark.parametrize(
    ("domain", "operator", "answer"),
    [
        ("", "MatMul", False),
        ("ai.graphopt", "Hadamard", False),
        ("", "DequantizeLinear", True),
        ("com.microsoft", "MatMulNBits", True),
        ("ai.graphopt", "MatMulTable", True),
        ("ai.graphopt", "GatherTable", True),
    ],
)
def test_a_graph_reads_codes_where_one_of_its_nodes_does(domain: str, operator: str, answer: bool) -> None:
    x = ir.val("x", ir.DataType.FLOAT, [2, 8])
    nodes = [ir.node("Relu", [x]), ir.Node(domain, operator, [x], num_outputs=1)]
    graph = ir.Graph([x], nodes[-1].outputs, nodes=nodes, opset_imports={"": 23, "ai.graphopt": 1, "com.microsoft": 1})
    assert reads_codes(graph) is answer
