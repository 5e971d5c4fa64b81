"""onnxruntime's own norms become standard ops, and the sum in front of them a separate node.

    SimplifiedLayerNormalization(x, gain)                   ->   RMSNormalization(x, gain)
    SkipSimplifiedLayerNormalization(x, y, gain, b)         ->   s = x + y + b;  RMSNormalization(s, gain);  s
    SkipLayerNormalization(x, y, gain, beta, b)             ->   s = x + y + b;  LayerNormalization(s, gain, beta);  s

onnxruntime's optimizer and its model builders write them; the first lies in the standard domain, which has no such op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.contrib import MICROSOFT
from graphopt.graph.diagnostics import Rule
from graphopt.graph.editing import Inserter, replace, take_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.passes.context import Ledger

_SUM = 3

NORM_REPLACED = Rule("canonicalize.norm-replaced", "{op} became {by}")
DEVIATION_READ = Rule(
    "canonicalize.deviation-read", "its inverse deviation is read, which RMSNormalization does not give"
)
STATISTICS_READ = Rule("canonicalize.statistics-read", "its mean or deviation is read, which {op} does not give here")


def lift_fused_norms(model: ir.Model, ledger: Ledger) -> None:
    """Lift every fused norm of the graph; the opset must be 23 or later."""
    for node in list(model.graph):
        if node.op_type == "SimplifiedLayerNormalization" and node.domain in ("", MICROSOFT):
            if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
                ledger.skipped(node, DEVIATION_READ())
                continue
            _lift(node, "RMSNormalization", node.inputs[0], list(node.inputs[1:2]), ledger)
        elif node.domain == MICROSOFT and node.op_type in _SKIPS:
            kind, gains = _SKIPS[node.op_type]
            if any(output.uses() or output.is_graph_output() for output in node.outputs[1:_SUM]):
                ledger.skipped(node, STATISTICS_READ(op=kind))
                continue
            inputs = [*node.inputs, *[None] * 5]
            norm = [value for value in inputs[2 : 2 + gains] if value is not None]
            _lift(node, kind, _sum(model.graph, node, inputs[2 + gains]), norm, ledger)


_SKIPS = {
    "SkipSimplifiedLayerNormalization": ("RMSNormalization", 1),
    "SkipLayerNormalization": ("LayerNormalization", 2),
}


def _sum(graph: ir.Graph, node: ir.Node, bias: ir.Value | None) -> ir.Value:
    """Return x + y + bias, which also replaces the sum that the fused norm outputs."""
    x, y = node.inputs[:2]
    assert x is not None
    insert = Inserter(graph, node, node.name or "norm")
    dims = None if x.shape is None else list(x.shape)
    total = insert.op("Add", [x, y], dims, x.dtype, "sum")
    if bias is not None:
        total = insert.op("Add", [total, bias], dims, x.dtype, "sum_with_bias")
    if len(node.outputs) > _SUM and (node.outputs[_SUM].uses() or node.outputs[_SUM].is_graph_output()):
        take_place(node.outputs[_SUM], total)
    return total


def _lift(node: ir.Node, kind: str, x: ir.Value | None, gains: Sequence[ir.Value | None], ledger: Ledger) -> None:
    epsilon = node.attributes.get_float("epsilon", 1e-5 if node.op_type == "SimplifiedLayerNormalization" else 1e-12)
    axis = node.attributes.get_int("axis", -1)
    norm = ir.node(kind, [x, *gains], {"axis": axis, "epsilon": epsilon, "stash_type": 1}, name=node.name)
    replace(node, norm, {node.outputs[0]: norm.outputs[0]})
    ledger.changed(norm, NORM_REPLACED(op=node.op_type, by=kind), [node])
