"""The product that makes the logits, and what may stand between the two."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.analysis.structure.ports import LOGITS
from graphopt.analysis.structure.products import lm_head_nodes
from graphopt.graph.diagnostics import Fact, Rule

if TYPE_CHECKING:
    import onnx_ir as ir

BY_POSITION = ("Add", "Sub", "Mul", "Div", "Tanh", "Cast", "Identity")
"""What may stand between the lm_head and the logits: it treats each position by itself, and has no shape of its own."""

NO_LOGITS = Rule("lm_head.no-logits", "the graph has no output of this name")
NO_PRODUCT = Rule("lm_head.no-product", "no product with a matrix makes the logits")
SEVERAL_PRODUCTS = Rule("lm_head.several-products", "{count} products make the logits: {lm_heads}")
BEHIND_PRODUCT = Rule("lm_head.behind-product", "{op} {node} stands behind the product that makes the logits")
NOT_BY_POSITION = Rule("lm_head.not-by-position", "{tensor} is not known to be floats [batch, length, width]")


def lm_head_of(graph: ir.Graph) -> ir.Node | Fact:
    """Return the product that makes the logits of each position of its input, or why there is no such product."""
    value = next((value for value in graph.outputs if value.name == LOGITS), None)
    if value is None:
        return NO_LOGITS()
    lm_heads = lm_head_nodes(graph)
    if len(lm_heads) > 1:
        names = ", ".join(sorted(str(node.name) for node in lm_heads))
        return SEVERAL_PRODUCTS(count=len(lm_heads), lm_heads=names)
    node = _product_behind(value, lm_heads)
    if isinstance(node, Fact):
        return node
    x = node.inputs[0]
    is_floating = x is not None and x.dtype is not None and x.dtype.is_floating_point()
    if x is None or not is_floating or x.shape is None or len(x.shape) != 3 or x.is_initializer():
        return NOT_BY_POSITION(tensor=None if x is None else x.name)
    return node


def _product_behind(value: ir.Value, lm_heads: set[ir.Node]) -> ir.Node | Fact:
    """Return the product that makes ``value``, with nothing but what works position by position between."""
    while True:
        node = value.producer()
        if node is None or not lm_heads:
            return NO_PRODUCT()
        if node in lm_heads:
            return node
        varying = [operand for operand in node.inputs if operand is not None and not same_for_all_positions(operand)]
        if node.op_type not in BY_POSITION or node.domain or len(varying) != 1:
            return BEHIND_PRODUCT(op=node.op_type, node=node.name)
        value = varying[0]


def same_for_all_positions(value: ir.Value) -> bool:
    """Return whether a value is a constant that positions share, such as a bias."""
    producer, shape = value.producer(), value.shape
    constant = value.is_initializer() or (producer is not None and producer.op_type == "Constant")
    return constant and shape is not None and (len(shape) < 2 or shape[-2] == 1)
