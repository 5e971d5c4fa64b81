"""Which node of one graph is which node of another: by structure and weights, names are labels.

What is known comes first, such as a compiler's own record. Then whole segments that are isomorphic, then nodes whose
surroundings of a few edges are the same and occur once, then the neighbours of nodes that were matched, then what sits
between the same neighbours. Surroundings are bounded on purpose: a hash of everything that a node depends on changes
for all nodes behind one change (openxla's hlo_diff tells of that trap).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from graphopt.analysis.structure.matching.align import aligned
from graphopt.analysis.structure.matching.labels import Scopes, labels
from graphopt.analysis.structure.matching.side import Side

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    import onnx_ir as ir

How = Literal["record", "structure", "surroundings", "neighbours", "similarity"]
"""What two nodes were matched by."""

CONFIDENCE: Mapping[How, float] = {
    "record": 1.0,
    "structure": 0.95,
    "surroundings": 0.9,
    "neighbours": 0.8,
    "similarity": 0.5,
}
"""How sure a match is: an order, not a probability."""

_RADII = (3, 2, 1)


@dataclass
class Matching:
    """Pairs of nodes.

    Attributes:
        pairs: for each matched node of the first graph, that of the second.
        back: the same the other way round.
        how: what each node of the first graph was matched by.
    """

    pairs: dict[ir.Node, ir.Node] = field(default_factory=dict)
    back: dict[ir.Node, ir.Node] = field(default_factory=dict)
    how: dict[ir.Node, How] = field(default_factory=dict)

    def add(self, before: ir.Node, after: ir.Node, how: How) -> bool:
        """Match two nodes if neither is matched yet; return whether it was done."""
        if before in self.pairs or after in self.back:
            return False
        self.pairs[before], self.back[after], self.how[before] = after, before, how
        return True


def match(before: Side, after: Side, known: Mapping[ir.Node, ir.Node], settled: set[ir.Node]) -> Matching:
    """Match the nodes of two graphs.

    Args:
        before: the first graph.
        after: the second.
        known: pairs that are certain.
        settled: nodes of either graph that are known to have no partner.
    """
    return _Matcher(before, after, settled).run(known)


class _Matcher:
    def __init__(self, before: Side, after: Side, settled: set[ir.Node]) -> None:
        self.before, self.after, self.settled = before, after, settled
        self.found = Matching()
        self.segments = aligned(before, after)
        self.scopes = Scopes(before, after, self.segments)

    def run(self, known: Mapping[ir.Node, ir.Node]) -> Matching:
        for ours, theirs in known.items():
            self.found.add(ours, theirs, "record")
        self._segments()
        for strict in (True, False):
            for radius in _RADII if strict else (*_RADII, 0):
                self._spread(self._unique(radius, strict))
        self._between()
        return self.found

    def _add(self, ours: ir.Node, theirs: ir.Node, how: How) -> bool:
        return not {ours, theirs} & self.settled and self.found.add(ours, theirs, how)

    def _segments(self) -> None:
        made = []
        for ours, theirs in self.segments:
            if self.before.folded.structures[ours] == self.after.folded.structures[theirs]:
                both = zip(self.before.folded.order[ours], self.after.folded.order[theirs], strict=True)
                made += [pair for pair in both if self._add(*pair, "structure")]
        self._spread(made)

    def _left(self) -> tuple[list[ir.Node], list[ir.Node]]:
        return (
            [node for node in self.before.nodes if node not in self.found.pairs and node not in self.settled],
            [node for node in self.after.nodes if node not in self.found.back and node not in self.settled],
        )

    def _unique(self, radius: int, strict: bool) -> list[tuple[ir.Node, ir.Node]]:
        """Match nodes whose surroundings are the same and occur once in each graph; loosely, once in each segment."""
        ours, theirs = self._left()
        if not ours or not theirs:
            return []
        numbers: dict[Hashable, int] = {}
        tables: list[dict[Hashable, list[ir.Node]]] = []
        for side, nodes, other in ((self.before, ours, False), (self.after, theirs, True)):
            of = labels(side, radius, strict, numbers)
            table: dict[Hashable, list[ir.Node]] = {}
            for node in nodes:
                scope = None if strict else self.scopes.of(node, other)
                table.setdefault((of[node], scope), []).append(node)
            tables.append(table)
        made = []
        for key, nodes in tables[0].items():
            partners = tables[1].get(key, [])
            if len(nodes) == len(partners) == 1 and self._add(nodes[0], partners[0], "surroundings"):
                made.append((nodes[0], partners[0]))
        return made

    def _spread(self, waiting: list[tuple[ir.Node, ir.Node]]) -> None:
        """Match neighbours of matched nodes, and theirs: what makes an input, readers that are alone of their kind."""
        waiting = list(waiting)
        while waiting:
            ours, theirs = waiting.pop()
            near = self._makers(ours, theirs)
            for mine, other in zip(ours.outputs, theirs.outputs, strict=False):
                near += self._readers(mine, other)
            waiting += [pair for pair in near if self._add(*pair, "neighbours")]

    def _makers(self, ours: ir.Node, theirs: ir.Node) -> list[tuple[ir.Node, ir.Node]]:
        read = dict(self.after.inputs(theirs))
        found = []
        for place, value in self.before.inputs(ours):
            mine, other = value.producer(), read[place].producer() if place in read else None
            if mine is None or other is None or mine in self.before.constant or other in self.after.constant:
                continue
            if self._alike(mine, other) and value.index() == read[place].index():
                found.append((mine, other))
        return found

    def _readers(self, ours: ir.Value, theirs: ir.Value) -> list[tuple[ir.Node, ir.Node]]:
        tables: list[dict[Hashable, list[ir.Node]]] = []
        for side, value, done in (
            (self.before, ours, self.found.pairs.keys()),
            (self.after, theirs, self.found.back.keys()),
        ):
            table: dict[Hashable, list[ir.Node]] = {}
            for node, place in side.readers.get(value, ()):
                if node not in done:
                    table.setdefault((side.does(node), place), []).append(node)
            tables.append(table)
        both = ((tables[0][key], tables[1][key]) for key in tables[0].keys() & tables[1].keys())
        return [(mine[0], other[0]) for mine, other in both if len(mine) == len(other) == 1]

    def _between(self) -> None:
        """Match what is left by the neighbours that it shares, the most alike first."""
        ours, theirs = self._left()
        near = {node: self._matched(node, self.after) for node in theirs}
        by_neighbour: dict[Hashable, list[ir.Node]] = {}
        for node, keys in near.items():
            for key in keys:
                by_neighbour.setdefault(key, []).append(node)
        ranked = []
        for number, node in enumerate(ours):
            keys = {
                (self.found.pairs[each], inward, place)
                for each, inward, place in self._matched(node, self.before)
                if each in self.found.pairs
            }
            for other in dict.fromkeys(each for key in keys for each in by_neighbour.get(key, ())):
                shared, alike = keys & near[other], self._alike(node, other)
                inwards = {inward for _, inward, _ in shared}
                if alike or len(inwards) == 2:  # another operator, but between the same neighbours
                    ranked.append((len(shared) + 2 * alike, -number, node, other))
        for _, _, node, other in sorted(ranked, key=lambda each: each[:2], reverse=True):
            if self._add(node, other, "similarity"):
                self._spread([(node, other)])

    def _alike(self, ours: ir.Node, theirs: ir.Node) -> bool:
        return self.before.does(ours) == self.after.does(theirs)

    @staticmethod
    def _matched(node: ir.Node, side: Side) -> set[tuple[ir.Node, bool, int]]:
        inward = {(v.producer(), True, place) for place, v in side.inputs(node) if v.producer() is not None}
        reading = (each for value in node.outputs for each in side.readers.get(value, ()))
        return {(each, True, place) for each, _, place in inward if each is not None} | {
            (each, False, place) for each, place in reading
        }


__all__ = ["CONFIDENCE", "How", "Matching", "Side", "match"]
