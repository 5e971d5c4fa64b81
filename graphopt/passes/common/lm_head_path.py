"""The way from the last product with a matrix to the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.analysis.structure.lm_head import BY_POSITION, same_for_all_positions
from graphopt.analysis.structure.products import lm_head_nodes, makes_last_logits
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.runtime_ops import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir

ONE_POSITION = Rule("last_logits.one-position", "they are of one position already")
SOME_POSITIONS = Rule("last_logits.some-positions", "they are of the last {count} positions already")
NO_PRODUCT = Rule("last_logits.no-product", "no product with a matrix makes them")
NOT_BY_POSITION = Rule("last_logits.not-by-position", "{tensor} is not known to be [batch, length, width]")
READ_ELSEWHERE = Rule("last_logits.read-elsewhere", "{tensor} is read elsewhere too")
BEHIND_PRODUCT = Rule("last_logits.behind-product", "{op} {node} stands behind the product that makes them")
INPUT_NOT_BY_POSITION = Rule(
    "last_logits.input-not-by-position", "the input of {lm_head} is not known to be [batch, length, width]"
)

_PARTS = ("RoundActivations", "Hadamard")


def path_to_lm_head(graph: ir.Graph, logits: ir.Value) -> list[ir.Node] | Fact:
    """Return the nodes from the logits back to the product that makes them, or why positions cannot be cut there."""
    lm_heads, path, value = lm_head_nodes(graph), [], logits
    positions = makes_last_logits(graph)
    if positions is not None:
        return ONE_POSITION() if positions == 1 else SOME_POSITIONS(count=positions)
    while True:
        node = value.producer()
        if node is None:
            return NO_PRODUCT()
        if value.shape is None or len(value.shape) != 3:
            return NOT_BY_POSITION(tensor=value.name)
        if len(value.uses()) > (0 if value is logits else 1) or (value is not logits and value.is_graph_output()):
            return READ_ELSEWHERE(tensor=value.name)
        path.append(node)
        if node in lm_heads:
            break
        varying = [value for value in node.inputs if value is not None and not same_for_all_positions(value)]
        if node.op_type not in BY_POSITION or node.domain or len(varying) != 1:
            return BEHIND_PRODUCT(op=node.op_type, node=node.name)
        value = varying[0]
    x = path[-1].inputs[0]
    if x is None or x.shape is None or len(x.shape) != 3 or x.is_initializer():
        return INPUT_NOT_BY_POSITION(lm_head=path[-1].name)
    return path


def nodes_of_product(product: ir.Node) -> list[ir.Node]:
    """Return ``product`` and, from it backwards, the rounding and rotation that ``lower`` makes a part of it."""
    nodes = [product]
    while True:
        x = nodes[-1].inputs[0]
        producer = None if x is None else x.producer()
        if x is None or producer is None or producer.domain != DOMAIN or producer.op_type not in _PARTS:
            return nodes
        if len(x.uses()) > 1 or x.is_graph_output():
            return nodes
        nodes.append(producer)
