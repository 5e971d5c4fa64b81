"""A graph of a few layers becomes the graph of all of them.

    embed -> layer 0 -> layer 1 -> norm  =>  embed -> layer 0 -> layer 1 -> layer 2 -> layer 3 -> norm

The last traced layer of each kind is the template of those that were not traced: its parameters, its caches and what
the layer before passes on are holes, all else is shared by every layer. That the holes are where they should be is
checked on the other traced layer of the kind, which must be the template with its own parameters and caches.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphopt.analysis.structure.ports import CachePort, past_port, present_port
from graphopt.graph.provenance import SCOPE
from graphopt.graph.weights import WeightTensor, expression_of
from graphopt.models.unrolling.layer_of_node import NO_LAYER, GraphLayers
from graphopt.models.unrolling.refusals import NODES, PORTS, NotUnderstoodError
from graphopt.models.unrolling.symbols import Symbols

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphopt.models.unrolling.kinds import Plan

Line = tuple[Any, ...]
_LAYER_INPUT = ("passed",)


def unroll(model: ir.Model, plan: Plan) -> None:
    """Give the graph of the traced layers all layers of the plan, in place.

    Args:
        model: a graph of the traced layers, with ports as :mod:`graphopt.models.ports` names them, and constants that
            are expressions over :class:`graphopt.models.checkpoint_tensors.Parameter`.
        plan: which layers it holds, and which it shall.

    Raises:
        NotUnderstoodError: two layers of one kind are different graphs, or layers share more than one tensor.
    """
    layers = GraphLayers(model.graph, plan)
    kinds = [plan.kinds[n] for n in plan.samples]
    for second, kind in enumerate(kinds):
        first = kinds.index(kind)
        difference = _difference(list(_lines(layers, first)), list(_lines(layers, second)), first == 0)
        if difference is not None:
            raise NotUnderstoodError(NODES(first=plan.samples[first], second=plan.samples[second], what=difference))
    _LayerWriter(model.graph, layers, plan).write()


def _difference(first: list[Line], second: list[Line], entry: bool) -> str | None:
    """Return where two layers differ, as text; what enters the first layer counts as passed on to it."""
    if len(first) != len(second):
        return f"{len(first)} and {len(second)} nodes"
    entries = set()
    for (*a, reads), (*b, twins) in zip(first, second, strict=True):
        if a != b or len(reads) != len(twins):
            return f"{a[0]} and {b[0]}"
        for x, y in zip(reads, twins, strict=True):
            if entry and y == _LAYER_INPUT:
                entries.add(x)
            elif x != y:
                return f"an input of {a[0]}"
    return "what enters" if len(entries) > 1 else None


def _lines(layers: GraphLayers, layer: int) -> Iterator[Line]:
    """Yield what each node of a layer is, in words that are the same for two layers that compute the same."""
    lines: dict[ir.Value, Line] = {}
    for number, node in enumerate(layers.nodes(layer)):
        lines.update({value: ("here", number, index) for index, value in enumerate(node.outputs)})
        attributes = sorted((name, _attribute(attribute)) for name, attribute in node.attributes.items())
        outputs = [(_part(present_port(value)), value is layers.outputs.get(layer)) for value in node.outputs]
        inputs = [lines.get(value) or _input(value, layers, layer) if value else () for value in node.inputs]
        yield (node.op_type, node.domain, attributes, outputs, inputs)


def _part(port: CachePort | None) -> str | None:
    return None if port is None else port.part


def _attribute(attribute: ir.Attr) -> str:
    if attribute.type == ir.AttributeType.TENSOR:
        return f"{attribute.value.dtype} {attribute.value.numpy().tolist()}"
    return f"{attribute.type} {attribute.value}"


def _input(value: ir.Value, layers: GraphLayers, layer: int) -> Line:
    if value is layers.outputs.get(layer - 1):
        return _LAYER_INPUT
    port = past_port(value) if value.is_graph_input() else None
    if port is not None and port.layer == layer:
        return ("cache", port.part)
    if value.is_initializer() and value.const_value is not None:
        if layers.owner(value) == layer:
            return ("weight", layers.rebind(value, layer, "").digest)
        return ("constant", expression_of(value.const_value).digest)
    return ("value", value)


class _LayerWriter:
    """Writes all layers into a graph: each one anew, like the traced layer that it is like."""

    def __init__(self, graph: ir.Graph, layers: GraphLayers, plan: Plan) -> None:
        self._graph, self._layers, self._plan = graph, layers, plan
        self._symbols = Symbols(graph, layers)
        self._inputs: dict[tuple[int, str], ir.Value] = {}
        self._outputs: dict[tuple[int, str], ir.Value] = {}
        self._weights: dict[tuple[int, ir.Value], ir.Value] = {}
        self._layer_outputs: dict[int, ir.Value] = {}

    def write(self) -> None:
        """Put all layers in the place of those that were traced."""
        graph, plan, layers = self._graph, self._plan, self._layers
        parts = self._parts()
        templates = [layers.nodes(layer) for layer in range(layers.count)]
        common_nodes = [node for node in graph if layers.layer_of(node) == NO_LAYER]
        template_of = {plan.kinds[n]: layer for layer, n in enumerate(plan.samples)}
        ends = [*plan.samples[1:], len(plan.kinds)]
        for layer, start in enumerate(plan.samples):
            # What layers share stays between the nodes where it is.
            copies = self._layer(start, layer)
            for template, copy in zip(templates[layer], copies, strict=True):
                graph.insert_after(template, copy)
            rest_of_run = range(start + 1, ends[layer])
            graph.insert_after(
                copies[-1], [node for n in rest_of_run for node in self._layer(n, template_of[plan.kinds[n]])]
            )
        for node in common_nodes:
            self._read_last_layer(node)
            self._move_scope(node, node)
        self._replace_ports(parts)
        graph.remove([node for nodes in templates for node in nodes], safe=True)
        for name, value in list(graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():
                del graph.initializers[name]
        self._name_weights()

    def _read_last_layer(self, node: ir.Node) -> None:
        """Let a node behind the layers read the output of the last of all of them."""
        last = self._layers.outputs.get(self._layers.count - 1)
        for index, value in enumerate(node.inputs):
            if value is not None and value is last:
                node.replace_input_with(index, self._layer_outputs[len(self._plan.kinds) - 1])

    def _name_weights(self) -> None:
        for (n, value), weight in self._weights.items():
            name = value.name or ""
            # What has no name of a parameter gets one of its module later; until then it only differs from others.
            is_parameter = name.startswith(f"{self._plan.prefix}.")
            weight.name = self._layers.scope_in(name, n) if is_parameter else f"{name}_{n}"

    def _layer(self, n: int, template: int) -> list[ir.Node]:
        """Return the nodes of layer ``n``, made like those of the traced layer at ``template``."""
        copies: dict[ir.Value, ir.Value] = {}
        nodes = []
        for node in self._layers.nodes(template):
            inputs = [
                None if value is None else copies.get(value) or self._layer_input(value, n, template)
                for value in node.inputs
            ]
            copy = ir.Node(
                node.domain,
                node.op_type,
                inputs,
                list(node.attributes.values()),
                num_outputs=len(node.outputs),
                version=node.version,
            )
            self._move_scope(node, copy, n)
            for before, after in zip(node.outputs, copy.outputs, strict=True):
                copies[before] = after
                after.name, after.type = f"{before.name}.{n}", before.type
                after.shape = self._symbols.rename(before.shape, n, template)
                port = present_port(before)
                if port is not None:
                    self._outputs[n, port.part] = after
                if before is self._layers.outputs.get(template):
                    self._layer_outputs[n] = after
            copy.name = f"{node.name}.{n}"
            nodes.append(copy)
        return nodes

    def _layer_input(self, value: ir.Value, n: int, template: int) -> ir.Value:
        """Return what layer ``n`` reads where the traced one reads ``value``."""
        if value is self._layers.outputs.get(template - 1):
            return self._layer_outputs[n - 1]
        port = past_port(value) if value.is_graph_input() else None
        if port is not None and port.layer == template:
            return self._input(value, n, port.part)
        if self._layers.owner(value) != template:
            return value
        if (n, value) not in self._weights:
            expression = self._layers.rebind(value, template, f"{self._plan.prefix}.{n}.")
            weight = ir.val(
                f"{value.name}.{n}", const_value=WeightTensor(expression), type=value.type, shape=value.shape
            )
            self._graph.initializers[weight.name or ""] = self._weights[n, value] = weight
        return self._weights[n, value]

    def _input(self, value: ir.Value, n: int, part: str) -> ir.Value:
        if (n, part) not in self._inputs:
            self._inputs[n, part] = ir.val(CachePort(n, part).past, type=value.type, shape=value.shape)
        return self._inputs[n, part]

    def _move_scope(self, before: ir.Node, after: ir.Node, n: int | None = None) -> None:
        """Write the module's own number into what the exporter wrote of a node's module."""
        scopes = before.metadata_props.get(SCOPE)
        if scopes is not None:
            names = [self._layers.scope_in(str(scope), n) for scope in ast.literal_eval(scopes)]
            after.metadata_props[SCOPE] = repr(names)

    def _parts(self) -> list[list[str]]:
        """Return the parts of the state of each traced layer in the order of the graph's ports.

        Raises:
            NotUnderstoodError: inputs or outputs are not in the order of the layers.
        """
        past = [port for value in self._graph.inputs if (port := past_port(value))]
        present = [port for value in self._graph.outputs if (port := present_port(value))]
        parts = [[port.part for port in past if port.layer == layer] for layer in range(self._layers.count)]
        if not past == present == [CachePort(layer, part) for layer, names in enumerate(parts) for part in names]:
            raise NotUnderstoodError(PORTS())
        return parts

    def _replace_ports(self, parts: list[list[str]]) -> None:
        """Give the graph the states of all layers, where those of the traced ones were."""
        graph, kinds = self._graph, self._plan.kinds
        template_of = {kinds[n]: layer for layer, n in enumerate(self._plan.samples)}
        past = {port: value for value in graph.inputs if (port := past_port(value))}
        # What reads the cache of a layer from outside of the layers reads it under its new number.
        for port, value in past.items():
            value.replace_all_uses_with(self._input(value, self._plan.samples[port.layer], port.part))
        ports = [(n, part) for n, kind in enumerate(kinds) for part in parts[template_of[kind]]]
        inputs = [value for value in graph.inputs if past_port(value) is None]
        graph.inputs.clear()
        graph.inputs.extend(
            [*inputs, *(self._input(past[CachePort(template_of[kinds[n]], part)], n, part) for n, part in ports)]
        )
        outputs = [self._replace_output(value) for value in graph.outputs]
        graph.outputs.clear()
        for n, part in ports:
            self._outputs[n, part].name = CachePort(n, part).present
        plain = [value for value in outputs if value is not None]
        graph.outputs.extend([*plain, *(self._outputs[port] for port in ports)])

    def _replace_output(self, value: ir.Value) -> ir.Value | None:
        """Return what an output of the graph is now; ``None`` for the cache of a traced layer, which loses its name."""
        name, last = value.name, self._layers.count - 1
        if value is self._layers.outputs.get(last):
            output = self._layer_outputs[len(self._plan.kinds) - 1]
            value.name, output.name, output.shape = f"{name}.traced", name, value.shape
            return output
        if present_port(value) is None:
            return value
        value.name = f"{name}.traced"
        return None
