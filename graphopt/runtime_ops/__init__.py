"""Operators of the domain ``ai.graphopt``: one folder, one operator.

Each folder holds what the operator means (its types, its shape rule and its body in standard ONNX operators), a NumPy
reference written from the definition, and its kernels. A model carries the body, so it runs in any onnxruntime; where
graphopt's library is registered, the kernel takes the node.
"""

from __future__ import annotations

import onnx_ir as ir

from graphopt.runtime_ops.dequantize.spec.op import DEQUANTIZE
from graphopt.runtime_ops.hadamard.spec.op import HADAMARD
from graphopt.runtime_ops.kv_attention.spec.op import KV_ATTENTION
from graphopt.runtime_ops.library import Device, library_path
from graphopt.runtime_ops.matmul_dynamic.spec.op import MATMUL_DYNAMIC
from graphopt.runtime_ops.matmul_table.spec.op import MATMUL_TABLE
from graphopt.runtime_ops.operator import DOMAIN, Cost, Operator
from graphopt.runtime_ops.round_activations.spec.op import ROUND_ACTIVATIONS
from graphopt.runtime_ops.round_trip.spec.op import ROUND_TRIP

OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        DEQUANTIZE,
        HADAMARD,
        KV_ATTENTION,
        MATMUL_DYNAMIC,
        MATMUL_TABLE,
        ROUND_ACTIVATIONS,
        ROUND_TRIP,
    )
}
"""Every operator by its name; a new one is one folder and one line."""


def declare(model: ir.Model) -> None:
    """Put the body of each of our operators that the graph or another body uses into the model, and import the domain.

    Where an operator has overloads, its nodes are told which. Bodies of the domain that no node uses any more are taken
    out, and the import with the last of them.

    Raises:
        ValueError: the graph has a node of the domain that is no operator of ours, or one whose attributes allow no
            body.
    """
    waiting = [node for node in model.graph.all_nodes() if node.domain == DOMAIN]
    unknown = {node.op_type for node in waiting} - OPERATORS.keys()
    if unknown:
        raise ValueError(f"{DOMAIN} has no operator {', '.join(sorted(unknown))}; it has {', '.join(OPERATORS)}")
    if waiting:
        model.opset_imports[DOMAIN] = max(OPERATORS[node.op_type].version for node in waiting)
    else:
        model.opset_imports.pop(DOMAIN, None)
    opset = model.opset_imports[""]
    bodies: dict[ir.OperatorIdentifier, ir.Function] = {}
    while waiting:
        node = waiting.pop()
        operator = OPERATORS[node.op_type]
        node.overload = operator.overload_of(node)
        if node.op_identifier() not in bodies:
            body = bodies[node.op_identifier()] = operator.body_of(node, opset)
            waiting += [inner for inner in body.all_nodes() if inner.domain == DOMAIN]
    for key in [key for key in model.functions if key[0] == DOMAIN and key not in bodies]:
        del model.functions[key]
    model.functions.update(sorted(bodies.items()))


__all__ = ["DOMAIN", "OPERATORS", "Cost", "Device", "Operator", "declare", "library_path"]
