"""Operators of the domain ``ai.graphopt``: one folder, one operator.

Each folder holds what the operator means (its types, its shape rule and its body in standard ONNX operators), a NumPy
reference written from the definition, and its kernels. A model carries the body, so it runs in any onnxruntime; where
graphopt's library is registered, the kernel takes the node.
"""

from __future__ import annotations

import onnx_ir as ir

from graphopt.runtime_ops.hadamard.op import HADAMARD
from graphopt.runtime_ops.library import library_path
from graphopt.runtime_ops.matmul_dynamic.op import MATMUL_DYNAMIC
from graphopt.runtime_ops.matmul_table.op import MATMUL_TABLE
from graphopt.runtime_ops.operator import DOMAIN, Cost, Operator
from graphopt.runtime_ops.round_trip.op import ROUND_TRIP

OPERATORS: dict[str, Operator] = {
    operator.name: operator for operator in (HADAMARD, MATMUL_DYNAMIC, MATMUL_TABLE, ROUND_TRIP)
}
"""Every operator by its name; a new one is one folder and one line."""


def declare(model: ir.Model) -> None:
    """Put the body of each of our operators that the graph or another body uses into the model, and import the domain.

    Raises:
        ValueError: the graph has a node of the domain that is no operator of ours.
    """
    used = {node.op_type for node in model.graph.all_nodes() if node.domain == DOMAIN}
    if not used:
        return
    unknown = used - OPERATORS.keys()
    if unknown:
        raise ValueError(f"{DOMAIN} has no operator {', '.join(sorted(unknown))}; it has {', '.join(OPERATORS)}")
    model.opset_imports[DOMAIN] = max(OPERATORS[name].version for name in used)
    opset = model.opset_imports[""]
    waiting, done = sorted(used), set[str]()
    while waiting:
        name = waiting.pop()
        if name not in done:
            done.add(name)
            function = OPERATORS[name].function(opset)
            model.functions[function.identifier()] = function
            waiting += [node.op_type for node in function.all_nodes() if node.domain == DOMAIN]


__all__ = ["DOMAIN", "OPERATORS", "Cost", "Operator", "declare", "library_path"]
