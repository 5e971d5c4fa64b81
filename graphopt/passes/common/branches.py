"""A branch of few directions beside a product with codes: what rounding lost, in float16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.graph.diagnostics import Rule

if TYPE_CHECKING:
    from graphopt.passes.context import Ledger

BRANCH = Rule("branches.beside", "{rank} directions of what rounding {weight} lost, in float16 beside the product")


def put_beside(
    graph: ir.Graph, node: ir.Node, weight: ir.Value, branch: tuple[ir.Value, ir.Value], ledger: Ledger
) -> None:
    """Add a branch to a product y = MatMul(x, W): y = Add(MatMul(x, W), MatMul(MatMul(x, A), B)).

    Args:
        graph: the graph.
        node: the product.
        weight: what W was before it was rounded.
        branch: A, float16 [rows, rank], and B, float16 [rank, columns]. Both are cast to the type of the weight, which
            onnxruntime folds as it loads.
        ledger: where the branch is written down.
    """
    x, old, name = node.inputs[0], node.outputs[0], node.name or "product"
    down, up = branch
    assert x is not None and down.const_value is not None and weight.dtype is not None
    rank = down.const_value.shape.numpy()[1]
    nodes: list[ir.Node] = []
    wide: list[ir.Value] = []
    for part, half in (("left", down), ("right", up)):
        cast = ir.node("Cast", [half], {"to": weight.dtype}, name=f"{name}.{part}")
        cast_value = cast.outputs[0]
        cast_value.name, cast_value.dtype, cast_value.shape = f"{half.name}.wide", weight.dtype, half.shape
        nodes.append(cast)
        wide.append(cast_value)
    inside = ir.node("MatMul", [x, wide[0]], name=f"{name}.inside")
    past = ir.node("MatMul", [inside.outputs[0], wide[1]], name=f"{name}.past")
    total = ir.node("Add", [old, past.outputs[0]], name=f"{name}.corrected")
    nodes += [inside, past]
    for cast_value, width in ((inside.outputs[0], rank), (past.outputs[0], None), (total.outputs[0], None)):
        node_made = cast_value.producer()
        assert node_made is not None
        cast_value.name, cast_value.type, cast_value.shape = f"{node_made.name}.output", old.type, old.shape
        if width is not None:
            cast_value.shape = None if x.shape is None else ir.Shape([*[*x.shape][:-1], width])
    old.replace_all_uses_with(total.outputs[0], replace_graph_outputs=True)
    total.replace_input_with(0, old)
    total.outputs[0].name, old.name = old.name, f"{old.name}.rounded"
    graph.insert_before(node, nodes)
    graph.insert_after(node, total)
    for new_node in (*nodes, total):
        ledger.changed(new_node, BRANCH(rank=rank, weight=weight.name), [node, weight])
