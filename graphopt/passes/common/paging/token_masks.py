"""The mask of recurrences where lengths per row say what is padding.

    mask = Slice(attention_mask, -T)      ->      mask[b, t] = 1 where t >= T - new_length[b]

The new tokens of a row are the last columns of a call, so both mean the same. What a mask means is found out by running
it, see :mod:`graphopt.passes.common.masks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import shared_constant
from graphopt.runtime_ops import DOMAIN, OPERATORS, port

if TYPE_CHECKING:
    from graphopt.passes.common.masks import MaskEvaluator
    from graphopt.passes.context import Ledger

_MASK = "mask"

BY_LENGTHS = Rule("page_kv.mask-by-lengths", "new_length says which of its tokens are padding")
OTHER_MASK = Rule("page_kv.other-mask", "the mask of {node} does not say which of the new tokens are padding{why}")


def masked_recurrences(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes of operators with a state that read a mask of their new tokens."""
    nodes = [node for node in graph if node.domain == DOMAIN and node.op_type in OPERATORS]
    recurrences = [node for node in nodes if _MASK in OPERATORS[node.op_type].schema.input_names]
    return [node for node in recurrences if (mask := port(node, _MASK)) is not None and not mask.is_initializer()]


def why_not_by_lengths(nodes: list[ir.Node], evaluator: MaskEvaluator) -> Fact | None:
    """Return why the mask of one of the nodes is not the columns of the new tokens; ``None`` if each is."""
    for node in nodes:
        mask = port(node, _MASK)
        assert mask is not None
        results = evaluator.run(mask)
        if isinstance(results, Fact):
            return OTHER_MASK(node=node.name, why=results)
        for instance, array in results:
            padding = instance.padding[:, 0, 0, -instance.causal.shape[2] :]
            if array.shape != padding.shape or not np.array_equal(array != 0, padding):
                return OTHER_MASK(node=node.name, why=None)
    return None


def mask_by_lengths(
    graph: ir.Graph, nodes: list[ir.Node], tokens: ir.Value, new_length: ir.Value, ledger: Ledger
) -> None:
    """Let recurrences read a mask that is made of lengths.

    Args:
        graph: of the nodes.
        nodes: from :func:`masked_recurrences`.
        tokens: the input with a place for each new token, [batch, length, ...].
        new_length: how many of the columns, the last ones, are tokens of each row, int64 [batch].
        ledger: what is told of each.
    """
    if not nodes:
        return
    assert tokens.shape is not None
    rows, columns = list(tokens.shape)[:2]
    start, step, axis = (
        shared_constant(graph, f"token_mask.{name}", np.array(number, np.int64))
        for name, number in (("start", 0), ("step", 1), ("axis", [1]))
    )
    count = ir.node("Shape", [tokens], {"start": 1, "end": 2})
    scalar = ir.node("Squeeze", [count.outputs[0]])
    column = ir.node("Range", [start, scalar.outputs[0], step])
    padding = ir.node("Sub", [count.outputs[0], new_length])
    first = ir.node("Unsqueeze", [padding.outputs[0], axis])
    is_token = ir.node("GreaterOrEqual", [column.outputs[0], first.outputs[0]])
    mask = ir.node("Cast", [is_token.outputs[0]], {"to": ir.DataType.INT64})
    steps: list[tuple[ir.Node, ir.DataType, list[int | ir.SymbolicDim]]] = [
        (count, ir.DataType.INT64, [1]),
        (scalar, ir.DataType.INT64, []),
        (column, ir.DataType.INT64, [columns]),
        (padding, ir.DataType.INT64, [rows]),
        (first, ir.DataType.INT64, [rows, 1]),
        (is_token, ir.DataType.BOOL, [rows, columns]),
        (mask, ir.DataType.INT64, [rows, columns]),
    ]
    for node, dtype, shape in steps:
        node.name = f"token_mask.{node.op_type}"
        node.outputs[0].name = f"{node.name}.output"
        node.outputs[0].dtype, node.outputs[0].shape = dtype, ir.Shape(shape)
    graph.insert_before(next(iter(graph)), [node for node, _, _ in steps])
    for node in nodes:
        node.replace_input_with(OPERATORS[node.op_type].schema.index(_MASK), mask.outputs[0])
        ledger.changed(node, BY_LENGTHS(), [node])
