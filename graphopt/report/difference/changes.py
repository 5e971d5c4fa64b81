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

_DEPTH, _FEW = 12, 8


class Comparer:
    """Compares nodes that belong together.

    Args:
        before: the first graph.
        after: the second.
        matched: which node is which.
        together: of nodes that several others became, or that several others were made of, a number of the edge.
        ports: which input of the second graph is which of the first.
        numbers: whether weights of one format are compared number by number.
    """

    def __init__(
        self,
        before: Side,
        after: Side,
        matched: Matching,
        together: Mapping[ir.Node, int],
        ports: Mapping[ir.Value, ir.Value],
        numbers: bool,
    ) -> None:
        self.before, self.after, self.matched, self.together = before, after, matched, together
        self.ports, self.numbers = ports, numbers
        self._moved: dict[tuple[ir.Value, ir.Value], Difference | None] = {}

    def changes(self, ours: ir.Node, theirs: ir.Node) -> list[Change]:
        """Return what is different."""
        found = []
        if (ours.domain, ours.op_type) != (theirs.domain, theirs.op_type):
            found.append(Change(what="operator", name="", before=operator(ours), after=operator(theirs)))
        else:
            found += self._attributes(ours, theirs)
        read = dict(self.after.inputs(theirs))
        mine = dict(self.before.inputs(ours))
        for place in sorted(mine.keys() | read.keys()):
            change = self._input(place, mine.get(place), read.get(place))
            if change is not None:
                found.append(change)
        return found

    @staticmethod
    def _attributes(ours: ir.Node, theirs: ir.Node) -> Iterator[Change]:
        for name in sorted({*ours.attributes, *theirs.attributes}):
            mine, other = ours.attributes.get(name), theirs.attributes.get(name)
            if mine is None or other is None or attribute_key(mine) != attribute_key(other):
                yield Change(what="attribute", name=name, before=_attribute(mine), after=_attribute(other))

    def _input(self, place: int, ours: ir.Value | None, theirs: ir.Value | None) -> Change | None:
        if ours is not None and theirs is not None:
            constant = self.before.is_constant(ours), self.after.is_constant(theirs)
            if all(constant):
                return self._constant(place, ours, theirs)
            if not any(constant) and self.same(ours, theirs):
                return None
        said = [_source(value, side) for value, side in ((ours, self.before), (theirs, self.after))]
        return Change(what="input", name=str(place), before=said[0], after=said[1])

    def _constant(self, place: int, ours: ir.Value, theirs: ir.Value) -> Change | None:
        moved = self._apart(ours, theirs) if self.numbers else None
        if moved is None and self.before.constant_key(ours) == self.after.constant_key(theirs):
            return None
        said = stored_as(ours, self.before.constant), stored_as(theirs, self.after.constant)
        figures = {} if moved is None else {k: v for k, v in vars(moved).items() if v is not None and v < float("inf")}
        return Change(what="weight", name=str(place), before=said[0], after=said[1], figures=figures)

    def _apart(self, ours: ir.Value, theirs: ir.Value) -> Difference | None:
        """Return how far two constants are apart: that of their tensors which differ most."""
        if (ours, theirs) in self._moved:
            return self._moved[ours, theirs]
        mine, other = ours.producer(), theirs.producer()
        found: Difference | None = None
        if mine is not None and other is not None and kind(mine) == kind(other):
            reads = zip(mine.inputs, other.inputs, strict=False)
            each = (self._apart(a, b) for a, b in reads if a is not None and b is not None)
            found = max((one for one in each if one is not None), key=lambda one: one.changed, default=None)
        elif _comparable(ours, theirs) and ours.const_value is not None and theirs.const_value is not None:
            found = difference(ours.const_value, theirs.const_value)
        elif sample(ours.const_value) != sample(theirs.const_value):
            found = Difference(1.0)
        self._moved[ours, theirs] = found
        return found

    def same(self, ours: ir.Value, theirs: ir.Value, depth: int = _DEPTH) -> bool:
        """Return whether two values are the same place of both graphs; what was added or removed is seen through."""
        mine, other = ours.producer(), theirs.producer()
        if mine is None and other is None:
            return self.ports.get(theirs) is ours
        if mine is not None and other is not None:
            if self.matched.pairs.get(mine) is other:
                return ours.index() == theirs.index()
            if mine in self.together and self.together.get(other) == self.together[mine]:
                return True
        if not depth:
            return False
        if mine is not None and other is not None and self._repeats(ours, theirs, mine, other, depth):
            return True
        if other is not None and other not in self.matched.back:
            return any(self.same(ours, value, depth - 1) for _, value in self.after.inputs(other))
        if mine is not None and mine not in self.matched.pairs:
            return any(self.same(value, theirs, depth - 1) for _, value in self.before.inputs(mine))
        return False

    def _repeats(self, ours: ir.Value, theirs: ir.Value, mine: ir.Node, other: ir.Node, depth: int) -> bool:
        """Return whether a node without a partner computes what another does, as where equal nodes became one."""
        if mine in self.matched.pairs and other in self.matched.back:
            return False
        if ours.index() != theirs.index() or kind(mine) != kind(other) or len(mine.inputs) != len(other.inputs):
            return False
        return all(
            a is b if a is None or b is None else self._reads_same(a, b, depth - 1)
            for a, b in zip(mine.inputs, other.inputs, strict=True)
        )

    def _reads_same(self, ours: ir.Value, theirs: ir.Value, depth: int) -> bool:
        constant = self.before.is_constant(ours), self.after.is_constant(theirs)
        if all(constant):
            return self.before.constant_key(ours) == self.after.constant_key(theirs)
        return not any(constant) and self.same(ours, theirs, depth)


def operator(node: ir.Node) -> str:
    """Return the operator of a node, behind its domain where that is not ONNX's own."""
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _comparable(ours: ir.Value, theirs: ir.Value) -> bool:
    mine, other = ours.const_value, theirs.const_value
    return (
        ours.is_initializer()
        and theirs.is_initializer()
        and mine is not None
        and other is not None
        and (mine.dtype, tuple(mine.shape.numpy())) == (other.dtype, tuple(other.shape.numpy()))
    )


def _attribute(attribute: ir.Attr | None) -> str:
    if attribute is None:
        return "absent"
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        graphs = [attribute.value] if attribute.type == ir.AttributeType.GRAPH else attribute.value
        return f"a graph of {sum(len(graph) for graph in graphs)} nodes"
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.value
        return plain(str(tensor.numpy().tolist()) if tensor.size <= _FEW else f"{tensor.dtype}{list(tensor.shape)}")
    return plain(str(attribute.value))


def _source(value: ir.Value | None, side: Side) -> str:
    if value is None:
        return "absent"
    producer = value.producer()
    if side.is_constant(value):
        return stored_as(value, side.constant)
    return plain((value.name or "?") if producer is None else producer.name or value.name or "?")
