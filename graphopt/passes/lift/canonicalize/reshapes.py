"""Reshapes that change nothing, and products that an exporter wraps in reshapes, as it does for ``addmm``.

    Reshape(Add(MatMul(Reshape(x, [-1, K]), W), b), [batch, length, N])   ->   Add(MatMul(x, W), b)
    Reshape(x, <the shape of x>)                                          ->   x

``MatMul`` takes any number of leading axes, and what reads the last axis only commutes with flattening the others.
Where x is not yet [batch, length, K] (heads still apart, say), one reshape in front of the product stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.cast_circles import cast_circles
from graphopt.graph.diagnostics import Rule
from graphopt.graph.editing import bypass, name_output, remove, take_place
from graphopt.graph.weights import new_weight, weight_of
from graphopt.passes.common.nodes import scalar

if TYPE_CHECKING:
    from graphopt.passes.context import Ledger

RESHAPE_GONE = Rule("canonicalize.reshape-gone", "a reshape to the shape that was there is gone")
CAST_GONE = Rule("canonicalize.cast-gone", "a cast to the type that was there, or a product with 1, is gone")
NO_RESHAPES = Rule("canonicalize.unflattened", "reads and writes the shape around it, without reshapes")
OTHER_SHAPE_BACK = Rule("canonicalize.other-shape-back", "the reshapes around it do not restore the shape of its input")


def drop_idle_reshapes(model: ir.Model, ledger: Ledger) -> None:
    """Remove reshapes to the shape that is there: the exporter gives equal sizes equal names."""
    for node in list(model.graph):
        x, y = node.inputs[0] if node.inputs else None, node.outputs[0]
        if node.op_type != "Reshape" or x is None or x.shape is None or y.shape is None or y.is_graph_output():
            continue
        dims = list(x.shape)
        if dims != list(y.shape) or any(isinstance(dim, ir.SymbolicDim) and dim.value is None for dim in dims):
            continue
        bypass(node, x)
        ledger.report_change(node.name or "?", RESHAPE_GONE())


def drop_idle_casts(model: ir.Model, ledger: Ledger) -> None:
    """Remove casts to the type that was there, directly or by a wider one, and products with 1."""
    for node in cast_circles(model.graph):
        first = node.inputs[0].producer() if node.inputs[0] is not None else None
        source = None if first is None else first.inputs[0]
        assert source is not None
        bypass(node, source)
        ledger.report_change(node.name or "?", CAST_GONE())
    for node in list(model.graph):
        x, y = node.inputs[0] if node.inputs else None, node.outputs[0]
        if node.domain or x is None or x.dtype is None or y.is_graph_output():
            continue
        is_idle_cast = node.op_type == "Cast" and x.dtype == node.attributes.get_int("to", 0)
        is_unit_factor = (
            node.op_type == "Mul" and scalar(node.inputs[1]) == 1.0 and x.shape is not None and x.shape == y.shape
        )
        if is_idle_cast or is_unit_factor:
            bypass(node, x)
            ledger.report_change(node.name or "?", CAST_GONE())


def unflatten_products(model: ir.Model, ledger: Ledger) -> None:
    """Let products read and write the shape around them."""
    for node in list(model.graph):
        if node.op_type != "MatMul" or weight_of(node, 1) is None or node.inputs[0] is None:
            continue
        flatten = node.inputs[0].producer()
        last, unflatten = _chain_to_reshape(node)
        if flatten is None or flatten.op_type != "Reshape" or unflatten is None:
            continue
        source = _unflattened_input(model.graph, flatten, last, unflatten)
        if source is None:
            ledger.skipped(node, OTHER_SHAPE_BACK())
            continue
        result = unflatten.outputs[0]
        assert result.shape is not None
        node.replace_input_with(0, source)
        for value in _values_between(node, last):
            width = None if value.shape is None else value.shape[-1]
            value.shape = ir.Shape([*result.shape[:-1], width])
        take_place(result, last.outputs[0])
        remove(unflatten)
        ledger.changed(node, NO_RESHAPES(), [flatten, unflatten])


def _values_between(first: ir.Node, last: ir.Node) -> list[ir.Value]:
    """Return the outputs of the nodes from ``first`` to ``last``, each the only reader of the one before."""
    values = [first.outputs[0]]
    while values[-1] is not last.outputs[0]:
        (use,) = values[-1].uses()
        values.append(use.node.outputs[0])
    return values


def _chain_to_reshape(product: ir.Node) -> tuple[ir.Node, ir.Node | None]:
    """Follow additions of constant vectors behind ``product``; return the last, and the ``Reshape`` that reads it."""
    current = product
    while len(uses := current.outputs[0].uses()) == 1 and not current.outputs[0].is_graph_output():
        (use,) = uses
        if use.node.op_type == "Reshape" and use.idx == 0:
            return current, use.node
        bias = weight_of(use.node, 1 - use.idx) if use.node.op_type == "Add" else None
        if bias is None or len(bias.shape or (0, 0)) != 1:
            break
        current = use.node
    return current, None


def _unflattened_input(graph: ir.Graph, flatten: ir.Node, last: ir.Node, unflatten: ir.Node) -> ir.Value | None:
    """Return x as [batch, length, K], where the two reshapes only folded batch and length and unfolded them again."""
    x, flat = flatten.inputs[0], flatten.outputs[0].shape
    product, result = last.outputs[0].shape, unflatten.outputs[0].shape
    if x is None or x.shape is None or flat is None or product is None or result is None:
        return None
    if len(flat) != 2 or len(product) != 2 or len(result) != 3 or product[-1] != result[-1]:
        return None
    width = flat[-1]
    if list(x.shape[:2]) != list(result[:2]) or not isinstance(width, int):
        return None
    if len(x.shape) == 3:
        return x if x.shape[-1] == width else None
    # 0 keeps an axis as it is.
    shape = np.array([0, 0, width], np.int64)
    target = new_weight(graph, f"{flatten.name}.shape", ir.tensor(shape))
    reshape = ir.node("Reshape", [x, target], name=f"{flatten.name}.unflattened")
    graph.insert_before(flatten, reshape)
    return name_output(reshape, x, [*x.shape[:2], width])
