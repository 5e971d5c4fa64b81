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

SHARED = -1
"""The place of what belongs to no layer."""

# What these say of a tensor is its size, which no weight changes.
_SIZES = ("Shape", "Size")


class Places:
    """The layers of a graph, by the modules that the exporter wrote into each node.

    What several layers read, and depends on no layer's weights or caches, belongs to none of them: the exporter merges
    equal computations and leaves them where the first one was.

    Args:
        graph: what was exported of the chosen layers of ``plan``.
        plan: names the list of layers.

    Attributes:
        count: how many layers the graph has.
        passed: what each layer passes on to the next; what the last one passes on is read behind the layers.

    Raises:
        NotUnderstoodError: a layer passes on more than one tensor, or to others than the next.
    """

    def __init__(self, graph: ir.Graph, plan: Plan) -> None:
        self.count = len(plan.chosen)
        self.passed: dict[int, ir.Value] = {}
        self._prefix, self._chosen = plan.prefix, plan.chosen
        self._place: dict[ir.Node, int] = {}
        self._leaves = {value: _leaves(value) for value in graph.initializers.values()}
        for node in graph:
            if any(
                attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
                for attribute in node.attributes.values()
            ):
                raise NotUnderstoodError(SUBGRAPHS(node=node.name))
            self._place[node] = self._scope(node)
        self._settle()

    def of(self, node: ir.Node) -> int:
        """Return the number of a node's layer in the graph, or :data:`SHARED`."""
        return self._place[node]

    def nodes(self, place: int) -> list[ir.Node]:
        """Return the nodes of a layer, in the order of the graph."""
        return [node for node, found in self._place.items() if found == place]

    def owner(self, weight: ir.Value) -> int:
        """Return the layer whose parameters a constant is made of, or :data:`SHARED`."""
        found = {self._layer_of(leaf.name) for leaf in self._leaves.get(weight, ())}
        return found.pop() if len(found) == 1 else SHARED

    def moved(self, weight: ir.Value, place: int, name: str) -> Expression:
        """Return what a constant is made of, with the parameters of another layer.

        Args:
            weight: a constant of the layer ``place``.
            place: that layer.
            name: what the names of the other layer's parameters begin with.
        """
        own = f"{self._prefix}.{place}."
        leaves: Mapping[Node, Node] = {
            leaf: Parameter(name + leaf.name.removeprefix(own), leaf.kind, leaf.dims) for leaf in self._leaves[weight]
        }
        return expression_of(weight.const_value).replacing(leaves)

    def scope_in(self, module: str, n: int | None) -> str:
        """Return the name of a module of the traced model in the whole one.

        Args:
            module: its name; any other text is returned as it is.
            n: the layer that it is part of there; ``None`` for the one that was traced.
        """
        place = self._layer_of(module)
        if place == SHARED:
            return module
        rest = module.removeprefix(f"{self._prefix}.{place}")
        return f"{self._prefix}.{self._chosen[place] if n is None else n}{rest}"

    def _layer_of(self, name: str) -> int:
        found = re.match(rf"{re.escape(self._prefix)}\.(\d+)\.", f"{name}.")
        return int(found[1]) if found else SHARED

    def _scope(self, node: ir.Node) -> int:
        scopes = node.metadata_props.get(SCOPE)
        layers = [self._layer_of(str(scope)) for scope in (ast.literal_eval(scopes) if scopes else ())]
        return max(layers, default=SHARED)

    def _settle(self) -> None:
        """Find what layers pass on, and take out of them what they share."""
        varying: set[ir.Value] = set()
        for node in self._place:
            if any(self._varies(value, varying) for value in node.inputs) and node.op_type not in _SIZES:
                varying.update(node.outputs)
        self._adopt(varying)
        for node, place in list(self._place.items()):
            if place == SHARED:
                continue
            for value in node.outputs:
                readers = {self._place[reader] for reader in value.consumers()} - {place}
                if value.is_graph_output() and present_port(value) is None:
                    readers.add(SHARED)
                if not readers:
                    continue
                if value not in varying:
                    self._share(node)
                elif readers == {place + 1 if place + 1 < self.count else SHARED} and place not in self.passed:
                    self.passed[place] = value
                else:
                    raise NotUnderstoodError(CROSSING(layer=place + 1))

    def _adopt(self, varying: set[ir.Value]) -> None:
        """Give nodes between those of a layer to that layer, where the exporter wrote none into them."""
        leads: dict[ir.Node, int] = {}
        for node, place in reversed(self._place.items()):
            behind = [leads[reader] for value in node.outputs for reader in value.consumers()]
            leads[node] = place if place != SHARED else min(behind, default=self.count)
        for node, place in list(self._place.items()):
            if place == SHARED and leads[node] < self.count and any(value in varying for value in node.outputs):
                before = [self._place[producer] for value in node.inputs if value and (producer := value.producer())]
                self._place[node] = max([place for place in before if place != SHARED], default=leads[node])

    def _varies(self, value: ir.Value | None, varying: set[ir.Value]) -> bool:
        if value is None:
            return False
        if value in varying or (value.is_graph_input() and past_port(value) is not None):
            return True
        return any(self._layer_of(leaf.name) != SHARED for leaf in self._leaves.get(value, ()))

    def _share(self, node: ir.Node) -> None:
        """Take a node, and what it is computed from, out of its layer."""
        waiting = [node]
        while waiting:
            found = waiting.pop()
            if self._place[found] != SHARED:
                self._place[found] = SHARED
                waiting += [producer for value in found.inputs if value and (producer := value.producer())]


def _leaves(value: ir.Value) -> list[Parameter]:
    if value.const_value is None:
        return []
    return [node for node in nodes_below(expression_of(value.const_value)) if isinstance(node, Parameter)]
