"""Segments compared exactly, by structure: two are isomorphic if, and only if, they are written alike.

The inputs of a node are in order. So a walk from the end of a segment backwards, input by input, puts its nodes into an
order that depends on no name. In that order each node is written down: what it does, and where each input comes from.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from graphopt.analysis.structure.folding.labels import constant_of, dims, kind_of, rounds, stored_inputs
from graphopt.analysis.structure.folding.trunk import Cuts, Segment, constant_nodes, inputs_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    import onnx_ir as ir


class Writer:
    """Writes the segments of a graph down.

    Args:
        graph: the graph.
        cuts: its segments.
        numbers: of structures that were written before; give it to the writers of two graphs to compare them.
    """

    def __init__(self, graph: ir.Graph, cuts: Cuts, numbers: dict[Hashable, int] | None = None) -> None:
        self._cuts = cuts
        self._constant = constant_nodes(graph)
        self._inputs = {value: number for number, value in enumerate(graph.inputs)}
        self._ids: dict[Hashable, int] = {} if numbers is None else numbers
        self._cones: dict[ir.Value, int] = {}
        self._last = {segment.end for segment in cuts.segments}

    def write(self, segment: Segment) -> tuple[list[ir.Node], Hashable]:
        """Return the nodes that make up the structure of a segment in their order, and what is written of it.

        Nodes that only round, or that only make a constant of stored codes, are no part of the structure. Segments are
        to be given from tokens to logits.
        """
        inside = set(segment.nodes)
        order: dict[ir.Node, int] = {}
        if segment.end is not None:
            self._walk(segment.end, inside, order)
        # Side outputs, such as caches: where two are alike, either order writes the same.
        remainder = [node for node in segment.nodes if self._counts(node)]
        sources = {value.producer() for node in remainder for value in inputs_of(node)}
        sides = [node for node in remainder if node not in sources and node not in order]
        for node in sorted(sides, key=lambda node: self._rank(node, inside, order)):
            self._walk(node, inside, order)
        return list(order), tuple(self._line(node, order) for node in order)

    def _counts(self, node: ir.Node) -> bool:
        return node not in self._constant and not rounds(node)

    def _walk(self, start: ir.Node, inside: set[ir.Node], order: dict[ir.Node, int]) -> None:
        """Number ``start`` and what it is made of, inputs first."""
        waiting: list[tuple[ir.Node, bool]] = [(start, False)]
        stack_nodes: set[ir.Node] = set()
        while waiting:
            node, ready = waiting.pop()
            if ready and self._counts(node):
                order.setdefault(node, len(order))
            if ready or node in stack_nodes or node in order or node in self._constant:
                continue
            stack_nodes.add(node)
            waiting.append((node, True))
            makers = [value.producer() for value in inputs_of(node)]
            waiting += [(maker, False) for maker in reversed(makers) if maker is not None and maker in inside]

    def _rank(self, node: ir.Node, inside: set[ir.Node], order: Mapping[ir.Node, int]) -> int:
        """Return a number of the cone of a side output; the same for cones that are written alike."""
        cone: dict[ir.Node, int] = {}
        self._walk(node, inside - order.keys(), cone)
        positions = {**order, **{member: len(order) + number for member, number in cone.items()}}
        return self._id(("side", tuple(self._line(member, positions) for member in cone)))

    def _line(self, node: ir.Node, order: Mapping[ir.Node, int]) -> Hashable:
        stored_numbers = stored_inputs(node)
        reads = tuple(
            None if value is None else self._source(value, order)
            for number, value in enumerate(node.inputs)
            if number not in stored_numbers
        )
        inner = tuple(self._source(value, order) for value in inputs_of(node)[self._count_inputs(node) :])
        while reads and reads[-1] is None:
            reads = reads[:-1]
        # Whether the hidden states of a last layer are an output of the model, too, does not make it another layer.
        outward = node not in self._last
        outputs = tuple(
            (() if stored_numbers else dims(output), outward and output.is_graph_output()) for output in node.outputs
        )
        return kind_of(node, self._constant), reads, inner, outputs

    @staticmethod
    def _count_inputs(node: ir.Node) -> int:
        return sum(value is not None for value in node.inputs)

    def _source(self, value: ir.Value, order: Mapping[ir.Node, int]) -> Hashable:
        producer = value.producer()
        while producer is not None and rounds(producer) and producer.inputs[0] is not None:
            value = producer.inputs[0]
            producer = value.producer()
        if producer is None and not value.is_initializer():
            return "input", self._shared_inputs.get(value), dims(value)
        if producer is None or producer in self._constant:
            return constant_of(value)
        if producer in order:
            return "node", order[producer], value.index()
        if producer in self._cuts.segment_of:
            # Of a segment before: which node of it, counted so that all layers count alike.
            return "before", producer is self._ends.get(self._cuts.segment_of[producer]), value.index()
        return "shared", self._cone(value)

    @cached_property
    def _ends(self) -> dict[int, ir.Node | None]:
        return {number: segment.end for number, segment in enumerate(self._cuts.segments)}

    @cached_property
    def _shared_inputs(self) -> dict[ir.Value, int]:
        """Inputs that several segments read, by their place; one that a single segment reads is its own."""
        readers: dict[ir.Value, set[int]] = {value: set() for value in self._inputs}
        for node, number in self._cuts.segment_of.items():
            for value in inputs_of(node):
                if value in readers:
                    readers[value].add(number)
        return {value: self._inputs[value] for value, numbers in readers.items() if len(numbers) > 1}

    def _cone(self, value: ir.Value) -> int:
        """Return a number of a value that segments share: the same for values that are computed alike."""
        waiting: list[ir.Value] = [value]
        while waiting:
            operand = waiting[-1]
            producer = operand.producer()
            inner = [] if producer is None else [v for v in inputs_of(producer) if v not in self._cones]
            if inner and operand not in self._cones:
                waiting += inner
                continue
            waiting.pop()
            if operand in self._cones:
                continue
            content: Hashable = (
                ("input", self._inputs.get(operand)) if not operand.is_initializer() else constant_of(operand)
            )
            if producer is not None:
                reads = tuple(None if v is None else self._cones[v] for v in producer.inputs)
                content = (kind_of(producer, self._constant), reads, operand.index())
            self._cones[operand] = self._id(("cone", content))
        return self._cones[value]

    def _id(self, content: Hashable) -> int:
        return self._ids.setdefault(content, len(self._ids))


def intern_structures(structures: Iterable[Hashable], numbers: dict[Hashable, int] | None = None) -> list[int]:
    """Return a number for each, the same for equal ones: compared in full, so that no collision of hashes counts.

    Args:
        structures: what is numbered.
        numbers: those that were given before; new ones are added.
    """
    numbers = {} if numbers is None else numbers
    return [numbers.setdefault(structure, len(numbers)) for structure in structures]
