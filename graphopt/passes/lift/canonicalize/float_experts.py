"""onnxruntime's own mixture of experts of floats becomes products of rows that are sorted by expert.

    y = MoE(x, router, W1 [E, N, hidden], b1, W2 [E, hidden, N2], b2; k, activation_type)
      ->   for each expert e, of the rows that go to it:  r = f(MatMul(rows, W1[e]^T) + b1[e])
           y = sum of w_e (MatMul(r, W2[e]^T) + b2[e])

See :mod:`graphopt.passes.common.fused_experts`. onnxruntime's optimizer and its model builder write them; so rotations
go through the products, and every format can store their weights. Those with codes, ``QMoE``, stay for the step
``unfuse_experts``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.contrib import contrib_nodes
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import replace
from graphopt.graph.weights import Reshape, Transpose, WeightTensor, expression_of, new_weight, weight_of
from graphopt.graph.weights.rearrangement import Slice
from graphopt.passes.common.fused_experts import FusedExperts, bias_of, split_gates, why_stays, write_experts

if TYPE_CHECKING:
    from graphopt.graph.weights import Expression
    from graphopt.passes.context import Ledger

EXPERTS_LIFTED = Rule(
    "canonicalize.experts-lifted", "MoE of {experts} experts became products of rows that are sorted by expert"
)
EXPERTS_NOT_CONSTANT = Rule(
    "canonicalize.experts-not-constant", "the weights or biases of its experts are no constants"
)
EXPERTS_NOT_FLOAT = Rule("canonicalize.experts-not-float", "it computes in {type}, and not in float32")
THIRD_MATRIX = Rule(
    "canonicalize.third-matrix", "its gates have a matrix of their own, which onnxruntime runs on GPUs only"
)

_MATRICES, _BIASES, _THIRD = (2, 4), (3, 5), (6, 7)


def lift_float_experts(model: ir.Model, ledger: Ledger) -> None:
    """Lift every ``MoE`` of the graph; say why one stays."""
    graph = model.graph
    for node in contrib_nodes(graph, "MoE"):
        reason = _refusal(node)
        if reason is not None:
            ledger.skipped(node, reason)
            continue
        is_gated = node.attributes.get_string("activation_type", "relu") == "swiglu"
        stacks = [_stack(node, index) for index in _MATRICES]
        first, second = (_input(node, index) for index in _BIASES)
        mixture = FusedExperts(node, stacks[0][1].shape[0], (bias_of(graph, first, is_gated=is_gated), second))
        matrices = [
            partial(_matrix, graph, *stack, is_apart=is_gated and not number) for number, stack in enumerate(stacks)
        ]
        nodes, output, _ = write_experts(graph, mixture, *matrices)
        replace(node, nodes, {node.outputs[0]: output})
        for new in nodes:
            ledger.changed(new, EXPERTS_LIFTED(experts=mixture.experts), [node])


def _refusal(node: ir.Node) -> Fact | None:
    if any(_input(node, index) is not None for index in _THIRD):
        return THIRD_MATRIX()
    for index in (*_MATRICES, *_BIASES):
        weight = weight_of(node, index) if _input(node, index) is not None else None
        if _input(node, index) is not None and (weight is None or weight.const_value is None):
            return EXPERTS_NOT_CONSTANT()
    types = {value.dtype for value in node.inputs if value is not None}
    if types != {ir.DataType.FLOAT}:
        return EXPERTS_NOT_FLOAT(type=", ".join(sorted(str(kind) for kind in types)))
    return why_stays(node)


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _stack(node: ir.Node, index: int) -> tuple[str, Expression]:
    """Return the name and the expression of the matrices [experts, N, K] of all experts."""
    weight = weight_of(node, index)
    assert weight is not None and weight.const_value is not None
    return weight.name or f"{node.name}.{index}", expression_of(weight.const_value)


def _matrix(graph: ir.Graph, name: str, stack: Expression, expert: int, *, is_apart: bool) -> ir.Value:
    """Return the matrix [K, N] of an expert, its gates in front of linear parts where they lie in turns."""
    part = Reshape(Slice.cut(stack, {0: slice(expert, expert + 1)}), stack.shape[1:])
    columns = Transpose(part, (1, 0))
    tensor = WeightTensor(split_gates(columns) if is_apart else columns)
    weight = new_weight(graph, f"{name}.{expert}", tensor)
    weight.dtype, weight.shape = tensor.dtype, ir.Shape(tensor.shape)
    return weight
