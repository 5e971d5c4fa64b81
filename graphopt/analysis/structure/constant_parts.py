"""Parts of a graph that depend on constants alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphopt.analysis.structure.decoded_weights import casts_codes

if TYPE_CHECKING:
    import onnx_ir as ir

# What is no computation, or not the same each time, or is stored in few bits on purpose.
_STAY = frozenset(("Constant", "Identity", "If", "Loop", "Scan", "DequantizeLinear", "QuantizeLinear", "Bernoulli"))
_STAY |= {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Dropout"}


@dataclass(frozen=True)
class ConstantResult:
    """A value that is computed from constants alone, and read by a node that is not.

    Attributes:
        value: the value.
        nodes: what computes it, in order.
        source_bytes: of the constants that only these nodes read.
    """

    value: ir.Value
    nodes: list[ir.Node]
    source_bytes: int


def constant_results(graph: ir.Graph) -> list[ConstantResult]:
    """Return what a graph computes of constants alone, outside of branches and loops."""
    constant_nodes: set[ir.Node] = set()
    for node in graph:
        is_pure = not node.domain and node.op_type not in _STAY and not casts_codes(node)
        if is_pure and all(_needs_no_other(value, constant_nodes) for value in node.inputs):
            constant_nodes.add(node)
    results = []
    for node in graph:
        for value in node.outputs if node in constant_nodes else ():
            if value.is_graph_output() or any(use.node not in constant_nodes for use in value.uses()):
                nodes = _nodes_behind(value, constant_nodes)
                if not value.is_graph_output():
                    results.append(ConstantResult(value, nodes, _bytes_read(nodes)))
    return results


def reads_constants_only(node: ir.Node, depth: int = 8) -> bool:
    """Return whether a node computes of constants alone, through so many nodes at most."""
    if node.domain or node.op_type in _STAY or not depth:
        return False
    sources = [(value, value.producer()) for value in node.inputs if value is not None]
    return all(
        value.is_initializer() or (producer is not None and reads_constants_only(producer, depth - 1))
        for value, producer in sources
    )


def _needs_no_other(value: ir.Value | None, constant_nodes: set[ir.Node]) -> bool:
    """Return whether a value is absent, stored, or made by one of ``constant_nodes``."""
    if value is None or value.is_initializer():
        return True
    producer = value.producer()
    return producer is not None and (
        producer in constant_nodes or (producer.op_type == "Constant" and not producer.domain)
    )


def _nodes_behind(value: ir.Value, constant_nodes: set[ir.Node]) -> list[ir.Node]:
    nodes: dict[ir.Node, None] = {}
    waiting = [value.producer()]
    while waiting:
        node = waiting.pop()
        if node is not None and node in constant_nodes and node not in nodes:
            nodes[node] = None
            waiting += [x.producer() for x in node.inputs if x is not None]
    return list(reversed(nodes))


def _bytes_read(nodes: list[ir.Node]) -> int:
    constants = {value for node in nodes for value in node.inputs if value is not None and value.is_initializer()}
    single_use = [value for value in constants if all(use.node in nodes for use in value.uses())]
    return sum(value.const_value.nbytes for value in single_use if value.const_value is not None)
