"""Attention whose heads are folded into the batch, as XGLM spells it, gets an axis of heads again.

    s = Reshape(MatMul(Reshape(q), Transpose(Reshape(k))))      q, k [batch, heads, length, size], products of 3 axes
    p = Reshape(Softmax(Reshape(s)))
      ->   s = MatMul(q, Transpose(k));  p = Softmax(s)

A reshape that leaves the last two axes as they are only folds the first two into one, and ``MatMul`` and a softmax over
the last axis treat each of those alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.graph.diagnostics import Rule
from graphopt.graph.editing import Inserter, clone_node
from graphopt.graph.weights import weight_of

if TYPE_CHECKING:
    from graphopt.passes.context import Ledger

HEADS_UNFOLDED = Rule("canonicalize.heads-unfolded", "heads that were folded into the batch have an axis of their own")


def unfold_heads(model: ir.Model, ledger: Ledger) -> None:
    """Let products and softmaxes whose result is reshaped to heads work on heads."""
    for node in list(model.graph):
        if node.domain or node.op_type not in ("MatMul", "Softmax"):
            continue
        insert = Inserter(model.graph, node, node.name or node.op_type)
        if node.op_type == "Softmax" and node.attributes.get_int("axis", -1) in (-1, 2):
            inputs = [_by_heads(node.inputs[0])]
        elif node.op_type == "MatMul" and weight_of(node, 0) is None and weight_of(node, 1) is None:
            inputs = [_by_heads(node.inputs[0]), _upright(insert, node.inputs[1])]
        else:
            continue
        readers = [use.node for use in node.outputs[0].uses()]
        if None in inputs or not readers or node.outputs[0].is_graph_output():
            continue
        first, *further = [value for value in inputs if value is not None]
        assert first.shape is not None
        last = (further or [first])[-1]
        dims = [*first.shape[:3], (last.shape or first.shape)[3]]
        folds_alike = all(list(value.shape or ())[:2] == list(first.shape)[:2] for value in further)
        if not folds_alike or any(reader.op_type != "Reshape" or _dims(reader) != dims for reader in readers):
            continue
        copy = clone_node(node, [first, *further], f"{node.name}.by_heads")
        if node.op_type == "Softmax":
            copy.attributes["axis"] = ir.AttrInt64("axis", -1)
        output = copy.outputs[0]
        output.name, output.type, output.shape = f"{copy.name}.output", node.outputs[0].type, ir.Shape(dims)
        model.graph.insert_before(node, copy)
        for reader in readers:
            reader.outputs[0].replace_all_uses_with(output)
        ledger.changed(copy, HEADS_UNFOLDED(), [node, *readers])
    RemoveUnusedNodesPass()(model)


def _dims(node: ir.Node) -> list[int | ir.SymbolicDim]:
    shape = node.outputs[0].shape
    return [] if shape is None or node.outputs[0].is_graph_output() else list(shape)


def _by_heads(value: ir.Value | None) -> ir.Value | None:
    """Return [batch, heads, m, n] that is reshaped to ``value`` [batch x heads, m, n]; ``None`` where it is not so."""
    node = None if value is None else value.producer()
    source = node.inputs[0] if node is not None and node.op_type == "Reshape" and not node.domain else None
    if source is None or source.shape is None or value is None or value.shape is None:
        return None
    dims, rows = list(source.shape), list(value.shape)
    are_known = all(isinstance(dim, int) or dim.value is not None for dim in dims)
    return source if are_known and (len(dims), len(rows)) == (4, 3) and dims[2:] == rows[1:] else None


def _upright(insert: Inserter, value: ir.Value | None) -> ir.Value | None:
    """Return what :func:`_by_heads` does, also behind a transpose of the last two axes."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Transpose" or tuple(node.attributes.get_ints("perm", ())) != (0, 2, 1):
        return _by_heads(value)
    source = _by_heads(node.inputs[0])
    if source is None or source.shape is None:
        return None
    batch, heads, rows, columns = source.shape
    return insert.op("Transpose", [source], [batch, heads, columns, rows], source.dtype, "turned", perm=[0, 1, 3, 2])
