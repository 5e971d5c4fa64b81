"""Logits that join a softmax and have no value, one for each query head: the sinks of gpt-oss.

    p_j = e^s_j / (e^l + sum e^s)
        = e^s_j / sum e^s * sum e^s / (e^l + sum e^s)  =  Softmax(s)_j * Sigmoid(log sum e^s - l)

The standard ``Attention`` has no input for l, but it returns its scores. So a sink is a factor of its output:

    y, present_k, present_v, s = Attention(q, k, v, m, past_k, past_v; qk_matmul_output_mode=2)
    y * Sigmoid(ReduceLogSumExp(s) - l)

Hidden scores are the lowest float in ``s``, so a query that sees no key gets 0, as in ``Attention`` itself. A head's
factor is one number for all channels, so values may be rotated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.editing import Inserter, shared_constant

if TYPE_CHECKING:
    from graphopt.graph.editing import Dims

SCORES = 3
"""The output of ``Attention`` that holds its scores."""

MASKED_SCORES = 2
"""``qk_matmul_output_mode``: scores as the softmax takes them, scaled, capped and masked."""

_MODE = "qk_matmul_output_mode"


def scale_by_sinks(insert: Inserter, y: ir.Value, scores: ir.Value, sinks: ir.Value) -> ir.Value:
    """Return ``y`` with the sinks' part of the softmax.

    Args:
        insert: where to compute it.
        y: of ``Attention``, float32 [batch, query heads, length, size].
        scores: its scores, float32 [batch, query heads, length, keys].
        sinks: the logits, float32 [query heads], or such that they broadcast to [batch, query heads, length, 1].
    """
    dims: list[int | str | ir.SymbolicDim | None] = [None] * 4 if y.shape is None else list(y.shape)
    column: Dims = [*dims[:3], 1]
    if sinks.shape is None or len(sinks.shape) != 4:
        sinks = _reshape(insert, sinks, [1, -1, 1, 1], [1, dims[1], 1, 1])
    axis = insert.integers([-1])
    total = insert.op("ReduceLogSumExp", [scores, axis], column, scores.dtype, "log_sum", keepdims=1)
    share = insert.op(
        "Sigmoid", [insert.op("Sub", [total, sinks], column, y.dtype, "beyond_sinks")], column, y.dtype, "share"
    )
    return insert.op("Mul", [y, share], dims, y.dtype, "with_sinks")


def sinks_of(attention: ir.Node) -> tuple[ir.Value, ir.Node] | None:
    """Return the logits of what :func:`scale_by_sinks` put behind ``Attention``, and the node that scales its output.

    ``None`` where its scores are read for anything else, or its output without the sinks.
    """
    if len(attention.outputs) <= SCORES or attention.attributes.get_int(_MODE, 0) != MASKED_SCORES:
        return None
    y, scores = attention.outputs[0], attention.outputs[SCORES]
    total = _only_reader(scores, "ReduceLogSumExp")
    difference = None if total is None else _only_reader(total.outputs[0], "Sub")
    share = None if difference is None else _only_reader(difference.outputs[0], "Sigmoid")
    product = None if share is None else _only_reader(share.outputs[0], "Mul")
    if total is None or difference is None or product is None or product is not _only_reader(y, "Mul"):
        return None
    sinks, axes = difference.inputs[1], total.inputs[1] if len(total.inputs) > 1 else None
    is_last_axis = axes is not None and axes.const_value is not None and axes.const_value.numpy().tolist() == [-1]
    if difference.inputs[0] is not total.outputs[0] or sinks is None or not is_last_axis:
        return None
    heads = None if y.shape is None else y.shape[1]
    is_by_head = sinks.shape is not None and list(sinks.shape) == [1, heads, 1, 1]
    return (sinks, product) if is_by_head and sinks.dtype == ir.DataType.FLOAT else None


def by_head(insert: Inserter, sinks: ir.Value) -> ir.Value:
    """Return logits [1, query heads, 1, 1] as [query heads]."""
    return _reshape(insert, sinks, [-1], [None if sinks.shape is None else sinks.shape[1]])


def no_sinks(graph: ir.Graph) -> ir.Value:
    """Return the placeholder for absent logits, float32 [0]."""
    return shared_constant(graph, "no_sinks", np.zeros(0, np.float32))


def _reshape(insert: Inserter, sinks: ir.Value, shape: list[int], dims: Dims) -> ir.Value:
    """Return logits in another shape, a constant where they are one."""
    if sinks.const_value is None:
        return insert.op("Reshape", [sinks, insert.integers(shape)], dims, sinks.dtype, "sinks")
    name = f"{sinks.name}.{len(shape)}d"
    return shared_constant(insert.graph, name, np.asarray(sinks.const_value.numpy()).reshape(shape))


def _only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    """Return the standard ``op_type`` that alone reads ``value``."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    node = uses[0].node
    return node if node.op_type == op_type and not node.domain else None
