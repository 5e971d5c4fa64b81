"""Attention whose heads are folded into the batch, as XGLM spells it, gets an axis of heads again.

    s = Reshape(MatMul(Reshape(q), Transpose(Reshape(k))))      q, k [batch, heads, length, size], products of 3 axes
    p = Reshape(Softmax(Reshape(s)))
      ->   s = MatMul(q, Transpose(k));  p = Softmax(s)

    Reshape(a * MatMul(..) + b)  ->  a * Reshape(MatMul(..)) + Reshape(b)      as Bloom spells it; b may be zeros

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
from graphopt.passes.common.nodes import scalar

if TYPE_CHECKING:
    from graphopt.passes.context import Ledger

HEADS_UNFOLDED = Rule("canonicalize.heads-unfolded", "heads that were folded into the batch have an axis of their own")


def unfold_heads(model: ir.Model, ledger: Ledger) -> None:
    """Let products and softmaxes whose result is reshaped to heads work on heads."""
    for node in list(model.graph):
        if node.op_type == "Reshape" and not node.domain:
            _reshape_first(model.graph, node, ledger)
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


def _reshape_first(graph: ir.Graph, reshape: ir.Node, ledger: Ledger) -> None:
    """Take heads out of the batch before numbers are multiplied and biases are added, not behind that."""
    scores = reshape.inputs[0]
    node, dims = None if scores is None else scores.producer(), _dims(reshape)
    if scores is None or node is None or node.domain or node.op_type not in ("Add", "Mul") or len(dims) != 4:
        return
    if len(scores.uses()) != 1 or scores.is_graph_output():
        return
    for x, operand in (node.inputs[:2], node.inputs[1::-1]):
        if x is None or operand is None or not _folds(x, dims) or not _comes_from_product(x):
            continue
        insert = Inserter(graph, reshape, f"{node.name}.by_heads")
        is_number = scalar(operand) is not None
        operand_by_heads = (
            operand if is_number else _bias_by_heads(insert, operand, dims) if node.op_type == "Add" else None
        )
        if operand_by_heads is None and not (node.op_type == "Add" and _is_zero(operand)):
            continue
        inner = clone_node(reshape, [x, reshape.inputs[1]], f"{reshape.name}.{node.op_type}")
        inner.outputs[0].name, inner.outputs[0].type = f"{inner.name}.output", x.type
        inner.outputs[0].shape = ir.Shape(dims)
        graph.insert_before(reshape, inner)
        result = inner.outputs[0]
        if operand_by_heads is not None:
            result = insert.op(node.op_type, [result, operand_by_heads], dims, x.dtype, "output")
        reshape.outputs[0].replace_all_uses_with(result)
        ledger.changed(inner, HEADS_UNFOLDED(), [node, reshape])
        for old in (reshape, node):
            graph.remove(old, safe=True)
        return _reshape_first(graph, inner, ledger)


def _folds(value: ir.Value, dims: list[int | ir.SymbolicDim]) -> bool:
    """Return whether a value is [batch x heads, m, n] where ``dims`` are [batch, heads, m, n]."""
    are_known = all(isinstance(dim, int) or dim.value is not None for dim in dims)
    return are_known and value.shape is not None and len(value.shape) == 3 and list(value.shape)[1:] == dims[2:]


def _comes_from_product(value: ir.Value) -> bool:
    """Return whether only numbers and biases stand between a value and a product of two activations."""
    node = value.producer()
    if node is None or node.domain:
        return False
    if node.op_type == "MatMul":
        return weight_of(node, 0) is None and weight_of(node, 1) is None
    is_step = node.op_type in ("Add", "Mul") and len(value.uses()) == 1
    return is_step and any(x is not None and _comes_from_product(x) for x in node.inputs)


def _bias_by_heads(insert: Inserter, bias: ir.Value, dims: list[int | ir.SymbolicDim]) -> ir.Value | None:
    """Return a bias [batch x heads, 1 or m, 1 or n] as [batch, heads, 1 or m, 1 or n]; ``None`` for another one."""
    heads = dims[1]
    if bias.shape is None or len(bias.shape) != 3 or not isinstance(heads, int) or _is_zero(bias):
        return None
    batch_heads, *row_sizes = list(bias.shape)
    if batch_heads == 1 or any(dim not in (1, whole) for dim, whole in zip(row_sizes, dims[2:], strict=True)):
        return None
    sizes = insert.op("Shape", [bias], [2], ir.DataType.INT64, "sizes", start=1, end=3)
    target = insert.op("Concat", [insert.integers([-1, heads]), sizes], [4], ir.DataType.INT64, "shape", axis=0)
    return insert.op("Reshape", [bias, target], [dims[0], heads, *row_sizes], bias.dtype, "bias")


def _is_zero(value: ir.Value) -> bool:
    """Return whether a value is zeros in any shape."""
    node = value.producer()
    source = node.inputs[0] if node is not None and node.op_type == "Expand" and not node.domain else value
    return scalar(source) == 0.0


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
