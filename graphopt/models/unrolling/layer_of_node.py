"""Which layer each node of a graph belongs to, and what one layer passes on to the next."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.ports import past_port, present_port
from graphopt.graph.provenance import SCOPE
from graphopt.graph.weights import Expression, Node, expression_of, nodes_below
from graphopt.models.checkpoint_tensors import Parameter
from graphopt.models.unrolling.refusals import CROSSING, SUBGRAPHS, NotUnderstoodError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphopt.models.unrolling.kinds import Plan

NO_LAYER = -1
"""The layer of what belongs to none."""

# What these say of a tensor is its size, which no weight changes.
_SIZES = ("Shape", "Size")


class GraphLayers:
    """The layers of a graph, by the modules that the exporter wrote into each node.

    What several layers read, and depends on no layer's weights or caches, belongs to none of them: the exporter merges
    equal computations and leaves them where the first one was.

    Args:
        graph: what was exported of the traced layers of ``plan``.
        plan: names the list of layers.

    Attributes:
        count: how many layers the graph has.
        outputs: what each layer passes on to the next; what the last one passes on is read behind the layers.

    Raises:
        NotUnderstoodError: a layer passes on more than one tensor, or to others than the next.
    """

    def __init__(self, graph: ir.Graph, plan: Plan) -> None:
        self.count = len(plan.samples)
        self.outputs: dict[int, ir.Value] = {}
        self._prefix, self._samples = plan.prefix, plan.samples
        self._layer: dict[ir.Node, int] = {}
        self._leaves = {value: _leaves(value) for value in graph.initializers.values()}
        for node in graph:
            if any(
                attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
                for attribute in node.attributes.values()
            ):
                raise NotUnderstoodError(SUBGRAPHS(node=node.name))
            self._layer[node] = self._scope(node)
        self._settle()

    def layer_of(self, node: ir.Node) -> int:
        """Return the number of a node's layer in the graph, or :data:`NO_LAYER`."""
        return self._layer[node]

    def nodes(self, layer: int) -> list[ir.Node]:
        """Return the nodes of a layer, in the order of the graph."""
        return [node for node, node_layer in self._layer.items() if node_layer == layer]

    def owner(self, weight: ir.Value) -> int:
        """Return the layer whose parameters a constant is made of, or :data:`NO_LAYER`."""
        owners = {self._layer_in(leaf.name) for leaf in self._leaves.get(weight, ())}
        return owners.pop() if len(owners) == 1 else NO_LAYER

    def rebind(self, weight: ir.Value, layer: int, name: str) -> Expression:
        """Return what a constant is made of, with the parameters of another layer.

        Args:
            weight: a constant of the layer ``layer``.
            layer: that layer.
            name: what the names of the other layer's parameters begin with.
        """
        prefix = f"{self._prefix}.{layer}."
        leaves: Mapping[Node, Node] = {
            leaf: Parameter(name + leaf.name.removeprefix(prefix), leaf.kind, leaf.dims)
            for leaf in self._leaves[weight]
        }
        return expression_of(weight.const_value).replacing(leaves)

    def scope_in(self, module: str, n: int | None) -> str:
        """Return the name of a module of the traced model in the whole one.

        Args:
            module: its name; any other text is returned as it is.
            n: the layer that it is part of there; ``None`` for the one that was traced.
        """
        layer = self._layer_in(module)
        if layer == NO_LAYER:
            return module
        path = module.removeprefix(f"{self._prefix}.{layer}")
        return f"{self._prefix}.{self._samples[layer] if n is None else n}{path}"

    def _layer_in(self, name: str) -> int:
        match = re.match(rf"{re.escape(self._prefix)}\.(\d+)\.", f"{name}.")
        return int(match[1]) if match else NO_LAYER

    def _scope(self, node: ir.Node) -> int:
        scopes = node.metadata_props.get(SCOPE)
        layers = [self._layer_in(str(scope)) for scope in (ast.literal_eval(scopes) if scopes else ())]
        return max(layers, default=NO_LAYER)

    def _settle(self) -> None:
        """Find what layers pass on, and take out of them what they share."""
        varying: set[ir.Value] = set()
        for node in self._layer:
            if any(self._varies(value, varying) for value in node.inputs) and node.op_type not in _SIZES:
                varying.update(node.outputs)
        self._adopt(varying)
        for node, layer in list(self._layer.items()):
            if layer == NO_LAYER:
                continue
            for value in node.outputs:
                readers = {self._layer[reader] for reader in value.consumers()} - {layer}
                if value.is_graph_output() and present_port(value) is None:
                    readers.add(NO_LAYER)
                if not readers:
                    continue
                if value not in varying:
                    self._share(node)
                elif readers == {layer + 1 if layer + 1 < self.count else NO_LAYER} and layer not in self.outputs:
                    self.outputs[layer] = value
                else:
                    raise NotUnderstoodError(CROSSING(layer=layer + 1))

    def _adopt(self, varying: set[ir.Value]) -> None:
        """Give nodes between those of a layer to that layer, where the exporter wrote none into them."""
        leads: dict[ir.Node, int] = {}
        for node, layer in reversed(self._layer.items()):
            reader_leads = [leads[reader] for value in node.outputs for reader in value.consumers()]
            leads[node] = layer if layer != NO_LAYER else min(reader_leads, default=self.count)
        for node, layer in list(self._layer.items()):
            if layer == NO_LAYER and leads[node] < self.count and any(value in varying for value in node.outputs):
                before = [self._layer[producer] for value in node.inputs if value and (producer := value.producer())]
                self._layer[node] = max([layer for layer in before if layer != NO_LAYER], default=leads[node])

    def _varies(self, value: ir.Value | None, varying: set[ir.Value]) -> bool:
        if value is None:
            return False
        if value in varying or (value.is_graph_input() and past_port(value) is not None):
            return True
        return any(self._layer_in(leaf.name) != NO_LAYER for leaf in self._leaves.get(value, ()))

    def _share(self, node: ir.Node) -> None:
        """Take a node, and what it is computed from, out of its layer."""
        waiting = [node]
        while waiting:
            member = waiting.pop()
            if self._layer[member] != NO_LAYER:
                self._layer[member] = NO_LAYER
                waiting += [producer for value in member.inputs if value and (producer := value.producer())]


def _leaves(value: ir.Value) -> list[Parameter]:
    if value.const_value is None:
        return []
    return [node for node in nodes_below(expression_of(value.const_value)) if isinstance(node, Parameter)]
