"""Which product makes the logits, which chooses experts, which lookup reads the tokens; which products are packed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from graphopt.graph.weights import weight_of
from graphopt.runtime_ops import DOMAIN, port, port_at, signature_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

LAST_POSITIONS = "last_{}"
"""Name of the dimension of logits that are of up to so many of the last positions of a call."""

_GATES = ("decay", "beta")

THIN = 8
"""Rows or columns up to which a matrix is a branch of few directions: codes of it would save nothing."""


def is_thin(weight: ir.Value) -> bool:
    """Return whether a matrix has so few rows or columns that it stays in floats."""
    return weight.const_value is not None and min(weight.const_value.shape.numpy()) <= THIN


def linear_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return every ``MatMul`` whose right side is a constant floating-point matrix, in order."""
    return [
        node
        for node in graph
        if node.op_type == "MatMul"
        and (weight := weight_of(node, 1)) is not None
        and weight.dtype is not None
        and weight.dtype.is_floating_point()
        and len(weight.shape or ()) == 2
    ]


def is_packed(node: ir.Node) -> bool:
    """Return whether ``node`` multiplies by a matrix of codes in the layout of our operators."""
    return reads_packed(node) and (signature := signature_of(node)) is not None and signature.is_product


def reads_packed(node: ir.Node) -> bool:
    """Return whether ``node`` reads codes in the layout of our operators: multiplies by them, or looks columns up."""
    signature = signature_of(node) if node.domain == DOMAIN else None
    return signature is not None and any(port.bits is not None for port in signature.inputs)


def reads_codes(graph: ir.Graph) -> bool:
    """Return whether a node of a graph reads codes: in our layout, onnxruntime's or logical ones."""
    return any(
        reads_packed(node) or node.op_type == "DequantizeLinear" or (node.domain and node.domain != DOMAIN)
        for node in graph
    )


def expert_count(node: ir.Node) -> int | None:
    """Return how many experts' matrices a product has, of which each row is multiplied by one; ``None`` for others."""
    codes = port(node, "codes") if (node.domain, node.op_type) == (DOMAIN, "MatMulExperts") else None
    size = None if codes is None or codes.shape is None else codes.shape[0]
    return size if isinstance(size, int) else None


def packed_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return every product with packed codes, in order."""
    return [node for node in graph if is_packed(node)]


def lm_head_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Return the products that make the logits: those with no other product between them and the output ``logits``."""
    return _products_behind([value for value in graph.outputs if value.name == "logits"])


def makes_last_logits(graph: ir.Graph) -> int | None:
    """Return of how many of the last positions of a call the output ``logits`` is, at most; ``None`` for all."""
    for value in graph.outputs:
        if value.name == "logits" and value.shape is not None:
            dims = list(value.shape)
            sizes = [dim if isinstance(dim, int) else None for dim in dims]
            return last_positions(sizes, [None if isinstance(dim, int) else dim.value for dim in dims])
    return None


def last_positions(shape: Sequence[int | None], symbols: Sequence[str | None]) -> int | None:
    """Return of how many of the last positions logits of a shape are, at most; ``None`` for all.

    Args:
        shape: [batch, 1 or a dimension that varies, vocabulary].
        symbols: names of its dimensions: ``last_K`` for up to K positions.
    """
    if len(shape) != 3:
        return None
    if shape[1] == 1:
        return 1
    match = re.fullmatch(LAST_POSITIONS.format(r"(\d+)"), (symbols[1] if len(symbols) == 3 else None) or "")
    return int(match[1]) if match else None


def router_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Return the products that choose experts: those with no other product between them and a ``TopK`` of floats."""
    scores = [node.inputs[0] for node in graph if node.op_type == "TopK"]
    floats = [value for value in scores if value is not None and value.dtype and value.dtype.is_floating_point()]
    return _products_behind(floats)


def gate_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Return the products that make nothing but decays and step sizes of recurrences, such as Mamba's ``dt_proj``.

    Of a gate of two thin matrices both are such products.
    """
    recurrences = [node for node in graph if (node.domain, node.op_type) == (DOMAIN, "LinearRecurrence")]
    values = [value for node in recurrences for name in _GATES if (value := port(node, name)) is not None]
    gates: set[ir.Node] = set()
    waiting = list(_products_behind(values))
    while waiting:
        node = waiting.pop()
        if node not in gates and _reaches_gates_only(node, gates):
            gates.add(node)
            first = node.inputs[0].producer() if node.inputs[0] is not None else None
            waiting += [first] if first is not None and _is_product(first) else []
    return gates


def _reaches_gates_only(product: ir.Node, gates: set[ir.Node]) -> bool:
    """Return whether all that is computed of a product ends in gates of recurrences, or in products that are gates."""
    waiting = list(product.outputs)
    values: set[ir.Value] = set()
    while waiting:
        value = waiting.pop()
        if value in values:
            continue
        values.add(value)
        if value.is_graph_output():
            return False
        for node, index in value.uses():
            input_port = port_at(node, index) if node.domain == DOMAIN else None
            if input_port is not None and input_port.name in _GATES:
                continue
            if node.domain or (_is_product(node) and node not in gates):
                return False
            waiting += [] if node in gates else node.outputs
    return True


def _is_product(node: ir.Node) -> bool:
    signature = signature_of(node)
    return node.op_type == "MatMul" or (signature is not None and signature.is_product)


def _products_behind(values: list[ir.Value]) -> set[ir.Node]:
    products: set[ir.Node] = set()
    waiting = [value.producer() for value in values]
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if _is_product(node):
            products.add(node)
        else:
            waiting.extend(value.producer() for value in node.inputs if value is not None)
    return products


def token_lookups(graph: ir.Graph) -> list[ir.Node]:
    """Return every ``Gather`` of rows of a constant floating-point table by ``input_ids``."""
    return [node for node in lookups(graph) if _is_tokens(node.inputs[1])]


def _is_tokens(value: ir.Value | None) -> bool:
    """Whether ``value`` is ``input_ids``, perhaps in another shape or integer type."""
    while value is not None and (producer := value.producer()) is not None:
        if producer.op_type not in ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Cast", "Identity"):
            return False
        value = producer.inputs[0]
    return value is not None and value.name == "input_ids"


def lookups(graph: ir.Graph) -> list[ir.Node]:
    """Return every ``Gather`` of rows of a constant floating-point table."""
    return [
        node
        for node in graph
        if node.op_type == "Gather"
        and node.attributes.get_int("axis", 0) == 0
        and (table := weight_of(node, 0)) is not None
        and table.dtype is not None
        and table.dtype.is_floating_point()
        and len(table.shape or ()) == 2
    ]
