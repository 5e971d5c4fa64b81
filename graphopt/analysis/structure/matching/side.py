"""One of two graphs that are compared: its nodes, what they read, its layers.

A node that only makes a constant, such as the ``DequantizeLinear`` of a weight, is no node of its own here: it is a
part of the constant that another node reads.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property

import onnx_ir as ir

from graphopt.analysis.structure.folding import fold
from graphopt.analysis.structure.folding.labels import matrix_of, stored_value
from graphopt.analysis.structure.folding.trunk import constant_nodes, inputs_of
from graphopt.analysis.structure.matching.contents import sample
from graphopt.analysis.structure.roles import roles_of

Reading = tuple[ir.Node, int]
"""A node, and the place of the input that it reads a value by."""


class Side:
    """A graph that is compared.

    Args:
        graph: the graph.
        numbers: of structures; the same for both sides.
    """

    def __init__(self, graph: ir.Graph, numbers: dict[Hashable, int]) -> None:
        self.graph = graph
        self.constant = constant_nodes(graph)
        self.nodes = [node for node in graph if node not in self.constant]
        self.folded = fold(graph, numbers)
        self.layer = self.folded.layer_of()
        self._inputs: dict[ir.Node, list[tuple[int, ir.Value]]] = {}
        self._samples: dict[ir.Value, Hashable] = {}
        self._does: dict[ir.Node, Hashable] = {}

    @cached_property
    def roles(self) -> dict[ir.Node, str]:
        """What each node is for."""
        return roles_of(self.graph, self.folded)

    @cached_property
    def readers(self) -> dict[ir.Value, list[Reading]]:
        """The nodes that read each value, and where."""
        found: dict[ir.Value, list[Reading]] = {}
        for node in self.nodes:
            for place, value in self.inputs(node):
                found.setdefault(value, []).append((node, place))
        return found

    def inputs(self, node: ir.Node) -> list[tuple[int, ir.Value]]:
        """Return what a node reads, with its place; what its branches read stands behind its inputs."""
        found = self._inputs.get(node)
        if found is None:
            found = [(place, value) for place, value in enumerate(node.inputs) if value is not None]
            found += enumerate(inputs_of(node)[len(found) :], len(node.inputs))
            self._inputs[node] = found
        return found

    def does(self, node: ir.Node) -> Hashable:
        """Return what a node does, whatever operator does it: products of matrices of one shape do the same."""
        found = self._does.get(node)
        if found is None:
            matrix = matrix_of(node, self.constant)
            found = self._does[node] = (node.domain, node.op_type) if matrix is None else ("product", matrix)
        return found

    def is_product(self, node: ir.Node) -> bool:
        """Return whether a node multiplies by a constant matrix."""
        return matrix_of(node, self.constant) is not None

    def is_constant(self, value: ir.Value) -> bool:
        """Return whether a value is stored in the file, or computed of such values only."""
        producer = value.producer()
        return value.is_initializer() if producer is None else producer in self.constant

    def constant_key(self, value: ir.Value) -> Hashable:
        """Return a key of a constant that depends on no name; numbers are sampled."""
        found = self._samples.get(value)
        if found is None:
            producer = value.producer()
            if producer is None:
                found = sample(value.const_value)
            else:
                reads = tuple(self.constant_key(each) for _, each in self.inputs(producer))
                found = (kind(producer), reads, value.index())
            self._samples[value] = found
        return found

    def made_of(self, node: ir.Node) -> list[ir.Node]:
        """Return the nodes that only make constants of ``node``."""
        found: dict[ir.Node, None] = {}
        waiting = [value for _, value in self.inputs(node)]
        while waiting:
            producer = waiting.pop().producer()
            if producer is not None and producer in self.constant and producer not in found:
                found[producer] = None
                waiting += [value for _, value in self.inputs(producer)]
        return list(found)


def kind(node: ir.Node) -> Hashable:
    """Return operator and attributes of a node, without its inputs and names."""
    attributes = tuple((name, attribute_key(each)) for name, each in sorted(node.attributes.items()))
    return node.domain, node.op_type, node.overload, attributes


def attribute_key(attribute: ir.Attr) -> Hashable:
    """Return a key of an attribute, equal for equal ones whatever the names inside are; tensors are sampled."""
    if attribute.is_ref():
        return "ref", attribute.ref_attr_name
    value = stored_value(attribute)
    if attribute.type == ir.AttributeType.TENSOR:
        return sample(value)
    if attribute.type == ir.AttributeType.TENSORS:
        return tuple(map(sample, value))
    if attribute.type == ir.AttributeType.GRAPH:
        return graph_key(value)
    if attribute.type == ir.AttributeType.GRAPHS:
        return tuple(map(graph_key, value))
    return tuple(value) if isinstance(value, (list, tuple)) else value if isinstance(value, Hashable) else str(value)


def graph_key(graph: ir.Graph | ir.Function) -> Hashable:
    """Return what a graph computes, node by node in its order; what it reads from outside is counted, not named."""
    numbers: dict[ir.Value, int] = {}
    for value in graph.inputs:
        numbers.setdefault(value, len(numbers))
    written = []
    stored = {} if isinstance(graph, ir.Function) else graph.initializers
    for value in stored.values():
        numbers.setdefault(value, len(numbers))
    for node in graph:
        reads = tuple(None if each is None else numbers.setdefault(each, len(numbers)) for each in node.inputs)
        written.append((kind(node), reads))
        for value in node.outputs:
            numbers.setdefault(value, len(numbers))
    made = tuple(numbers.setdefault(value, len(numbers)) for value in graph.outputs)
    return tuple(sample(value.const_value) for value in stored.values()), tuple(written), made
