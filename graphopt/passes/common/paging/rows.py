"""From [batch, heads, length, size] to [batch, length, heads x size] and back, without transposes where they cancel.

    Transpose(Reshape(x, [B, S, H, D]), [0, 2, 1, 3])      ->   x
    RotaryEmbedding(Transpose(Reshape(x)), cos, sin)       ->   RotaryEmbedding(x, cos, sin; num_heads=H)
    Hadamard(Transpose(Reshape(x)), left, right)           ->   Hadamard(x, left, right)
    RMSNormalization(Transpose(Reshape(x)), gain)          ->   Reshape(RMSNormalization(Reshape(x), gain))
    Reshape(Transpose(y, [0, 2, 1, 3]), [B, S, H D])       ->   y

A rotary embedding of a row of heads turns each head alike, as ``num_heads`` says; a transform of runs of D numbers is
the same for every head. What something else reads too stays as it is, and is transposed once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.editing import bypass, clone_node, name_output, shared_constant, take_place
from graphopt.runtime_ops import DOMAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

_BY_HEAD = (0, 2, 1, 3)


def as_rows(graph: ir.Graph, value: ir.Value, before: ir.Node) -> ir.Value:
    """Return ``value`` as [batch, length, heads x size]; what has to be made is inserted before the node ``before``."""
    if value.shape is None or len(value.shape) == 3:
        return value
    heads, size = value.shape[1], value.shape[3]
    node = value.producer()
    shape = ir.Shape([value.shape[0], value.shape[2], _product(heads, size)])
    if node is not None and _is_swap(node) and node.inputs[0] is not None:
        return _join_heads(graph, node.inputs[0], shape, before)
    is_only_use = len(value.uses()) == 1 and not value.is_graph_output()
    if node is not None and _by_heads(node) and is_only_use and node.inputs[0] is not None:
        rows = as_rows(graph, node.inputs[0], node)
        copy = _copy(node, [rows, *node.inputs[1:]])
        if node.op_type == "RotaryEmbedding":
            copy.attributes["num_heads"] = ir.AttrInt64("num_heads", int(str(heads)))
        graph.insert_before(node, copy)
        return name_output(copy, value, shape, name=f"{value.name}.rows")
    split_shape = ir.Shape([shape[0], shape[1], heads, size])
    transpose = node.inputs[0].producer() if node is not None and node.inputs and node.inputs[0] is not None else None
    if node is not None and transpose is not None and _by_head_size(node) and _is_swap(transpose) and is_only_use:
        norm = _copy(node, [transpose.inputs[0], *node.inputs[1:]])
        graph.insert_before(node, norm)
        name_output(norm, value, split_shape, name=f"{value.name}.by_position")
        return _join_heads(graph, norm.outputs[0], shape, before)
    swap = ir.node("Transpose", [value], {"perm": _BY_HEAD}, name=f"{value.name}.turned")
    graph.insert_before(before, swap)
    name_output(swap, value, split_shape)
    return _join_heads(graph, swap.outputs[0], shape, before)


def read_rows(graph: ir.Graph, old: ir.Value, rows: ir.Value, after: ir.Node) -> None:
    """Let all that reads ``old`` read ``rows`` instead, the same numbers as [batch, length, heads x size].

    What only joins the heads of ``old`` reads them joined; for anything else they are taken apart behind ``after``.
    """
    assert old.shape is not None and rows.shape is not None
    if len(old.shape) == 3:
        take_place(old, rows)
        return
    for swap in [use.node for use in old.uses()]:
        joins = [use.node for use in swap.outputs[0].uses()] if _is_swap(swap) else []
        if swap.outputs[0].is_graph_output():
            continue
        for join in joins:
            rows_value = join.outputs[0]
            if (
                join.op_type == "Reshape"
                and rows_value.shape is not None
                and list(rows_value.shape)[2:] == list(rows.shape)[2:]
            ):
                if rows_value.is_graph_output() or len(rows_value.shape) != 3:
                    continue
                bypass(join, rows)
    if not old.uses() and not old.is_graph_output():
        return
    heads, size = old.shape[1], old.shape[3]
    target = shared_constant(graph, f"{rows.name}.heads", np.array([0, 0, int(str(heads)), int(str(size))], np.int64))
    split_shape = ir.node("Reshape", [rows, target], name=f"{rows.name}.apart")
    name_output(split_shape, old, [rows.shape[0], rows.shape[1], heads, size])
    swap = ir.node("Transpose", [split_shape.outputs[0]], {"perm": _BY_HEAD}, name=f"{rows.name}.turned")
    graph.insert_after(after, [split_shape, swap])
    take_place(old, swap.outputs[0])


def _join_heads(graph: ir.Graph, value: ir.Value, shape: ir.Shape, before: ir.Node) -> ir.Value:
    """Return [batch, length, heads, size] as ``shape`` [batch, length, heads x size]."""
    node = value.producer()
    whole = node.inputs[0] if node is not None and node.op_type == "Reshape" else None
    if whole is not None and whole.shape is not None and len(whole.shape) == 3 and whole.shape[-1] == shape[-1]:
        return whole
    target = shared_constant(graph, f"rows_of_{shape[-1]}", np.array([0, 0, shape[-1]], np.int64))
    join = ir.node("Reshape", [value, target], name=f"{value.name}.joined")
    graph.insert_before(before, join)
    return name_output(join, value, shape)


def _is_swap(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and not node.domain and tuple(node.attributes.get_ints("perm", ())) == _BY_HEAD


def _by_heads(node: ir.Node) -> bool:
    """Return whether ``node`` treats each head alike and keeps its shape."""
    if node.op_type == "RotaryEmbedding" and not node.domain:
        return True
    return node.op_type == "Hadamard" and node.domain == DOMAIN


def _by_head_size(node: ir.Node) -> bool:
    """Return whether ``node`` treats each row of the last axis alike."""
    return node.op_type == "RMSNormalization" and not node.domain and node.attributes.get_int("axis", -1) in (-1, 3)


def _copy(node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Node:
    """Return a node like ``node`` on other inputs, whose last axis is the same."""
    copy = clone_node(node, inputs)
    if copy.op_type == "RMSNormalization":
        copy.attributes["axis"] = ir.AttrInt64("axis", -1)
    return copy


def _product(heads: object, size: object) -> int:
    return int(str(heads)) * int(str(size))
