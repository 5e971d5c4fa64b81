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
        self.folding = fold(graph, numbers)
        self.layer = self.folding.layer_of()
        self._inputs: dict[ir.Node, list[tuple[int, ir.Value]]] = {}
        self._samples: dict[ir.Value, Hashable] = {}
        self._operations: dict[ir.Node, Hashable] = {}

    @cached_property
    def roles(self) -> dict[ir.Node, str]:
        """What each node is for."""
        return roles_of(self.graph, self.folding)

    @cached_property
    def readers(self) -> dict[ir.Value, list[Reading]]:
        """The nodes that read each value, and where."""
        readers: dict[ir.Value, list[Reading]] = {}
        for node in self.nodes:
            for index, value in self.inputs(node):
                readers.setdefault(value, []).append((node, index))
        return readers

    def inputs(self, node: ir.Node) -> list[tuple[int, ir.Value]]:
        """Return what a node reads, with its place; what its branches read stands behind its inputs."""
        values = self._inputs.get(node)
        if values is None:
            values = [(index, value) for index, value in enumerate(node.inputs) if value is not None]
            values += enumerate(inputs_of(node)[len(values) :], len(node.inputs))
            self._inputs[node] = values
        return values

    def operation(self, node: ir.Node) -> Hashable:
        """Return what a node does, whatever operator does it: products of matrices of one shape do the same."""
        operation = self._operations.get(node)
        if operation is None:
            matrix = matrix_of(node, self.constant)
            operation = self._operations[node] = (node.domain, node.op_type) if matrix is None else ("product", matrix)
        return operation

    def is_product(self, node: ir.Node) -> bool:
        """Return whether a node multiplies by a constant matrix."""
        return matrix_of(node, self.constant) is not None

    def is_constant(self, value: ir.Value) -> bool:
        """Return whether a value is stored in the file, or computed of such values only."""
        producer = value.producer()
        return value.is_initializer() if producer is None else producer in self.constant

    def constant_key(self, value: ir.Value) -> Hashable:
        """Return a key of a constant that depends on no name; numbers are sampled."""
        key = self._samples.get(value)
        if key is None:
            producer = value.producer()
            if producer is None:
                key = sample(value.const_value)
            else:
                reads = tuple(self.constant_key(operand) for _, operand in self.inputs(producer))
                key = (kind(producer), reads, value.index())
            self._samples[value] = key
        return key

    def made_of(self, node: ir.Node) -> list[ir.Node]:
        """Return the nodes that only make constants of ``node``."""
        makers: dict[ir.Node, None] = {}
        waiting = [value for _, value in self.inputs(node)]
        while waiting:
            producer = waiting.pop().producer()
            if producer is not None and producer in self.constant and producer not in makers:
                makers[producer] = None
                waiting += [value for _, value in self.inputs(producer)]
        return list(makers)


def kind(node: ir.Node) -> Hashable:
    """Return operator and attributes of a node, without its inputs and names."""
    attributes = tuple((name, attribute_key(attribute)) for name, attribute in sorted(node.attributes.items()))
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
    nodes = []
    initializers = {} if isinstance(graph, ir.Function) else graph.initializers
    for value in initializers.values():
        numbers.setdefault(value, len(numbers))
    for node in graph:
        reads = tuple(None if operand is None else numbers.setdefault(operand, len(numbers)) for operand in node.inputs)
        nodes.append((kind(node), reads))
        for value in node.outputs:
            numbers.setdefault(value, len(numbers))
    outputs = tuple(numbers.setdefault(value, len(numbers)) for value in graph.outputs)
    return tuple(sample(value.const_value) for value in initializers.values()), tuple(nodes), outputs
