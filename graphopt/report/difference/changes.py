"""What is different between two nodes that belong together: operator, attributes, weights, what they read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.matching.contents import Difference, difference, sample
from graphopt.analysis.structure.matching.side import attribute_key, kind
from graphopt.report.description import stored_as
from graphopt.report.escape import plain
from graphopt.report.trace import Change

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from graphopt.analysis.structure.matching import Matching, Side

_DEPTH, _LARGEST = 12, 8


class Comparer:
    """Compares nodes that belong together.

    Args:
        before: the first graph.
        after: the second.
        matching: which node is which.
        edge_of: of nodes that several others became, or that several others were made of, a number of the edge.
        ports: which input of the second graph is which of the first.
        numbers: whether weights of one format are compared number by number.
    """

    def __init__(
        self,
        before: Side,
        after: Side,
        matching: Matching,
        edge_of: Mapping[ir.Node, int],
        ports: Mapping[ir.Value, ir.Value],
        numbers: bool,
    ) -> None:
        self.before, self.after, self.matching, self.edge_of = before, after, matching, edge_of
        self.ports, self.numbers = ports, numbers
        self._differences: dict[tuple[ir.Value, ir.Value], Difference | None] = {}

    def changes(self, first: ir.Node, second: ir.Node) -> list[Change]:
        """Return what is different."""
        changes = []
        if (first.domain, first.op_type) != (second.domain, second.op_type):
            changes.append(Change(what="operator", name="", before=operator(first), after=operator(second)))
        else:
            changes += self._attributes(first, second)
        inputs_after = dict(self.after.inputs(second))
        inputs_before = dict(self.before.inputs(first))
        for index in sorted(inputs_before.keys() | inputs_after.keys()):
            change = self._input(index, inputs_before.get(index), inputs_after.get(index))
            if change is not None:
                changes.append(change)
        return changes

    @staticmethod
    def _attributes(first: ir.Node, second: ir.Node) -> Iterator[Change]:
        for name in sorted({*first.attributes, *second.attributes}):
            before, after = first.attributes.get(name), second.attributes.get(name)
            if before is None or after is None or attribute_key(before) != attribute_key(after):
                yield Change(what="attribute", name=name, before=_attribute(before), after=_attribute(after))

    def _input(self, index: int, first: ir.Value | None, second: ir.Value | None) -> Change | None:
        if first is not None and second is not None:
            constant = self.before.is_constant(first), self.after.is_constant(second)
            if all(constant):
                return self._constant(index, first, second)
            if not any(constant) and self.is_same(first, second):
                return None
        texts = [_source(value, side) for value, side in ((first, self.before), (second, self.after))]
        return Change(what="input", name=str(index), before=texts[0], after=texts[1])

    def _constant(self, index: int, first: ir.Value, second: ir.Value) -> Change | None:
        distance = self._distance(first, second) if self.numbers else None
        if distance is None and self.before.constant_key(first) == self.after.constant_key(second):
            return None
        texts = stored_as(first), stored_as(second)
        figures = (
            {} if distance is None else {k: v for k, v in vars(distance).items() if v is not None and v < float("inf")}
        )
        return Change(what="weight", name=str(index), before=texts[0], after=texts[1], figures=figures)

    def _distance(self, first: ir.Value, second: ir.Value) -> Difference | None:
        """Return how far two constants are apart: that of their tensors which differ most."""
        if (first, second) in self._differences:
            return self._differences[first, second]
        producer, partner = first.producer(), second.producer()
        distance: Difference | None = None
        if producer is not None and partner is not None and kind(producer) == kind(partner):
            reads = zip(producer.inputs, partner.inputs, strict=False)
            distances = (self._distance(a, b) for a, b in reads if a is not None and b is not None)
            distance = max(
                (candidate for candidate in distances if candidate is not None),
                key=lambda candidate: candidate.changed,
                default=None,
            )
        elif _comparable(first, second) and first.const_value is not None and second.const_value is not None:
            distance = difference(first.const_value, second.const_value)
        elif sample(first.const_value) != sample(second.const_value):
            distance = Difference(1.0)
        self._differences[first, second] = distance
        return distance

    def is_same(self, first: ir.Value, second: ir.Value, depth: int = _DEPTH) -> bool:
        """Return whether two values are the same place of both graphs; what was added or removed is seen through."""
        producer, partner = first.producer(), second.producer()
        if producer is None and partner is None:
            return self.ports.get(second) is first
        if producer is not None and partner is not None:
            if self.matching.pairs.get(producer) is partner:
                return first.index() == second.index()
            if producer in self.edge_of and self.edge_of.get(partner) == self.edge_of[producer]:
                return True
            if depth and self._repeats(first, second, producer, partner, depth):
                return True
        return depth > 0 and self._is_same_behind(first, second, depth - 1)

    def _is_same_behind(self, first: ir.Value, second: ir.Value, depth: int) -> bool:
        """Return whether two values are the same but for a node in front of one of them that has no partner."""
        producer, partner = first.producer(), second.producer()
        if partner is not None and partner not in self.matching.back:
            return any(self.is_same(first, value, depth) for _, value in self.after.inputs(partner))
        if producer is not None and producer not in self.matching.pairs:
            return any(self.is_same(value, second, depth) for _, value in self.before.inputs(producer))
        return False

    def _repeats(self, first: ir.Value, second: ir.Value, producer: ir.Node, partner: ir.Node, depth: int) -> bool:
        """Return whether a node without a partner computes what another does, as where equal nodes became one."""
        if producer in self.matching.pairs and partner in self.matching.back:
            return False
        if (
            first.index() != second.index()
            or kind(producer) != kind(partner)
            or len(producer.inputs) != len(partner.inputs)
        ):
            return False
        return all(
            a is b if a is None or b is None else self._reads_same(a, b, depth - 1)
            for a, b in zip(producer.inputs, partner.inputs, strict=True)
        )

    def _reads_same(self, first: ir.Value, second: ir.Value, depth: int) -> bool:
        constant = self.before.is_constant(first), self.after.is_constant(second)
        if all(constant):
            return self.before.constant_key(first) == self.after.constant_key(second)
        return not any(constant) and self.is_same(first, second, depth)


def operator(node: ir.Node) -> str:
    """Return the operator of a node, behind its domain where that is not ONNX's own."""
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _comparable(first: ir.Value, second: ir.Value) -> bool:
    tensor, other_tensor = first.const_value, second.const_value
    return (
        first.is_initializer()
        and second.is_initializer()
        and tensor is not None
        and other_tensor is not None
        and (tensor.dtype, tuple(tensor.shape.numpy())) == (other_tensor.dtype, tuple(other_tensor.shape.numpy()))
    )


def _attribute(attribute: ir.Attr | None) -> str:
    if attribute is None:
        return "absent"
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        graphs = [attribute.value] if attribute.type == ir.AttributeType.GRAPH else attribute.value
        return f"a graph of {sum(len(graph) for graph in graphs)} nodes"
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.value
        return plain(str(tensor.numpy().tolist()) if tensor.size <= _LARGEST else f"{tensor.dtype}{list(tensor.shape)}")
    return plain(str(attribute.value))


def _source(value: ir.Value | None, side: Side) -> str:
    if value is None:
        return "absent"
    producer = value.producer()
    if side.is_constant(value):
        return stored_as(value)
    return plain((value.name or "?") if producer is None else producer.name or value.name or "?")
