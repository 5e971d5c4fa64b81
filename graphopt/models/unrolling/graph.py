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
from graphopt.models.unrolling.layer_of_node import SHARED, Places
from graphopt.models.unrolling.refusals import NODES, PORTS, NotUnderstoodError
from graphopt.models.unrolling.symbols import Symbols

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphopt.models.unrolling.kinds import Plan

Line = tuple[Any, ...]
_PASSED = ("passed",)


def unroll(model: ir.Model, plan: Plan) -> None:
    """Give the graph of the chosen layers all layers of the plan, in place.

    Args:
        model: a graph of the chosen layers, with ports as :mod:`graphopt.models.ports` names them, and constants that
            are expressions over :class:`graphopt.models.checkpoint_tensors.Parameter`.
        plan: which layers it holds, and which it shall.

    Raises:
        NotUnderstoodError: two layers of one kind are different graphs, or layers share more than one tensor.
    """
    places = Places(model.graph, plan)
    kinds = [plan.kinds[n] for n in plan.chosen]
    for second, kind in enumerate(kinds):
        first = kinds.index(kind)
        what = _difference(list(_lines(places, first)), list(_lines(places, second)), first == 0)
        if what is not None:
            raise NotUnderstoodError(NODES(first=plan.chosen[first], second=plan.chosen[second], what=what))
    _Unrolled(model.graph, places, plan).write()


def _difference(one: list[Line], two: list[Line], entry: bool) -> str | None:
    """Return where two layers differ, as text; what enters the first layer counts as passed on to it."""
    if len(one) != len(two):
        return f"{len(one)} and {len(two)} nodes"
    entered = set()
    for (*a, reads), (*b, others) in zip(one, two, strict=True):
        if a != b or len(reads) != len(others):
            return f"{a[0]} and {b[0]}"
        for x, y in zip(reads, others, strict=True):
            if entry and y == _PASSED:
                entered.add(x)
            elif x != y:
                return f"an input of {a[0]}"
    return "what enters" if len(entered) > 1 else None


def _lines(places: Places, place: int) -> Iterator[Line]:
    """Yield what each node of a layer is, in words that are the same for two layers that compute the same."""
    made: dict[ir.Value, Line] = {}
    for number, node in enumerate(places.nodes(place)):
        made.update({value: ("here", number, index) for index, value in enumerate(node.outputs)})
        attributes = sorted((name, _attribute(attribute)) for name, attribute in node.attributes.items())
        outputs = [(_part(present_port(value)), value is places.passed.get(place)) for value in node.outputs]
        inputs = [made.get(value) or _input(value, places, place) if value else () for value in node.inputs]
        yield (node.op_type, node.domain, attributes, outputs, inputs)


def _part(port: CachePort | None) -> str | None:
    return None if port is None else port.part


def _attribute(attribute: ir.Attr) -> str:
    if attribute.type == ir.AttributeType.TENSOR:
        return f"{attribute.value.dtype} {attribute.value.numpy().tolist()}"
    return f"{attribute.type} {attribute.value}"


def _input(value: ir.Value, places: Places, place: int) -> Line:
    if value is places.passed.get(place - 1):
        return _PASSED
    port = past_port(value) if value.is_graph_input() else None
    if port is not None and port.layer == place:
        return ("cache", port.part)
    if value.is_initializer() and value.const_value is not None:
        if places.owner(value) == place:
            return ("weight", places.moved(value, place, "").digest)
        return ("constant", expression_of(value.const_value).digest)
    return ("value", value)


class _Unrolled:
    """Writes all layers into a graph: each one anew, like the traced layer that it is like."""

    def __init__(self, graph: ir.Graph, places: Places, plan: Plan) -> None:
        self._graph, self._places, self._plan = graph, places, plan
        self._symbols = Symbols(graph, places)
        self._inputs: dict[tuple[int, str], ir.Value] = {}
        self._outputs: dict[tuple[int, str], ir.Value] = {}
        self._weights: dict[tuple[int, ir.Value], ir.Value] = {}
        self._passed: dict[int, ir.Value] = {}

    def write(self) -> None:
        """Put all layers in the place of those that were traced."""
        graph, plan, places = self._graph, self._plan, self._places
        parts = self._parts()
        traced = [places.nodes(place) for place in range(places.count)]
        shared = [node for node in graph if places.of(node) == SHARED]
        like = {plan.kinds[n]: place for place, n in enumerate(plan.chosen)}
        ends = [*plan.chosen[1:], len(plan.kinds)]
        for place, start in enumerate(plan.chosen):
            # What layers share stays between the nodes where it is.
            made = self._layer(start, place)
            for before, after in zip(traced[place], made, strict=True):
                graph.insert_after(before, after)
            more = [node for n in range(start + 1, ends[place]) for node in self._layer(n, like[plan.kinds[n]])]
            graph.insert_after(made[-1], more)
        last = places.passed.get(places.count - 1)
        for node in shared:
            for index, value in enumerate(node.inputs):
                if value is not None and value is last:
                    node.replace_input_with(index, self._passed[len(plan.kinds) - 1])
            self._move_scope(node, node)
        self._replace_ports(parts)
        graph.remove([node for nodes in traced for node in nodes], safe=True)
        for name, value in list(graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():
                del graph.initializers[name]
        for (n, value), own in self._weights.items():
            name = value.name or ""
            # What has no name of a parameter gets one of its module later; until then it only differs from others.
            named = name.startswith(f"{plan.prefix}.")
            own.name = places.scope_in(name, n) if named else f"{name}_{n}"

    def _layer(self, n: int, place: int) -> list[ir.Node]:
        """Return the nodes of layer ``n``, made like those of the traced layer at ``place``."""
        made: dict[ir.Value, ir.Value] = {}
        nodes = []
        for node in self._places.nodes(place):
            inputs = [
                None if value is None else made.get(value) or self._read(value, n, place) for value in node.inputs
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
                made[before] = after
                after.name, after.type = f"{before.name}.{n}", before.type
                after.shape = self._symbols.moved(before.shape, n, place)
                port = present_port(before)
                if port is not None:
                    self._outputs[n, port.part] = after
                if before is self._places.passed.get(place):
                    self._passed[n] = after
            copy.name = f"{node.name}.{n}"
            nodes.append(copy)
        return nodes

    def _read(self, value: ir.Value, n: int, place: int) -> ir.Value:
        """Return what layer ``n`` reads where the traced one reads ``value``."""
        if value is self._places.passed.get(place - 1):
            return self._passed[n - 1]
        port = past_port(value) if value.is_graph_input() else None
        if port is not None and port.layer == place:
            return self._input(value, n, port.part)
        if self._places.owner(value) != place:
            return value
        if (n, value) not in self._weights:
            expression = self._places.moved(value, place, f"{self._plan.prefix}.{n}.")
            own = ir.val(f"{value.name}.{n}", const_value=WeightTensor(expression), type=value.type, shape=value.shape)
            self._graph.initializers[own.name or ""] = self._weights[n, value] = own
        return self._weights[n, value]

    def _input(self, value: ir.Value, n: int, part: str) -> ir.Value:
        if (n, part) not in self._inputs:
            self._inputs[n, part] = ir.val(CachePort(n, part).past, type=value.type, shape=value.shape)
        return self._inputs[n, part]

    def _move_scope(self, before: ir.Node, after: ir.Node, n: int | None = None) -> None:
        """Write the module's own number into what the exporter wrote of a node's module."""
        scopes = before.metadata_props.get(SCOPE)
        if scopes is not None:
            moved = [self._places.scope_in(str(scope), n) for scope in ast.literal_eval(scopes)]
            after.metadata_props[SCOPE] = repr(moved)

    def _parts(self) -> list[str]:
        """Return the parts of a layer's cache in the order of the graph's ports.

        Raises:
            NotUnderstoodError: inputs or outputs are not in the order of the layers.
        """
        past = [port for value in self._graph.inputs if (port := past_port(value))]
        present = [port for value in self._graph.outputs if (port := present_port(value))]
        parts = [port.part for port in past if port.layer == 0]
        if not past == present == [CachePort(place, part) for place in range(self._places.count) for part in parts]:
            raise NotUnderstoodError(PORTS())
        return parts

    def _replace_ports(self, parts: list[str]) -> None:
        """Give the graph the caches of all layers, where those of the traced ones were."""
        graph, count = self._graph, len(self._plan.kinds)
        old = {past_port(value): value for value in graph.inputs if past_port(value)}
        kept = [value for value in graph.inputs if past_port(value) is None]
        # What reads the cache of a layer from outside of the layers reads it under its new number.
        for port, value in old.items():
            assert port is not None
            new = self._input(value, self._plan.chosen[port.layer], port.part)
            value.replace_all_uses_with(new)
        ports = [(n, part) for n in range(count) for part in parts]
        template = {part: value for port, value in old.items() if port and (part := port.part)}
        graph.inputs.clear()
        graph.inputs.extend([*kept, *(self._input(template[part], n, part) for n, part in ports)])
        last = self._places.passed.get(self._places.count - 1)
        before, others = list(graph.outputs), []
        graph.outputs.clear()
        for value in before:
            name, shape = value.name, value.shape
            if value is last:
                value.name, value = f"{name}.traced", self._passed[count - 1]
                value.name, value.shape = name, shape
            if present_port(value) is None:
                others.append(value)
            else:
                value.name = f"{name}.traced"
        for n, part in ports:
            self._outputs[n, part].name = CachePort(n, part).present
        graph.outputs.extend([*others, *(self._outputs[port] for port in ports)])
