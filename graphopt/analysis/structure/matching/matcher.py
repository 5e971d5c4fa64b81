"""Match the nodes of two graphs: certain pairs first, then ever weaker evidence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from graphopt.analysis.structure.matching.align import align_segments
from graphopt.analysis.structure.matching.labels import Scopes, labels

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    import onnx_ir as ir

    from graphopt.analysis.structure.matching.side import Side

Evidence = Literal["record", "structure", "surroundings", "neighbours", "similarity"]
"""What two nodes were matched by."""

CONFIDENCE: Mapping[Evidence, float] = {
    "record": 1.0,
    "structure": 0.95,
    "surroundings": 0.9,
    "neighbours": 0.8,
    "similarity": 0.5,
}
"""Evidence sure a match is: an order, not a probability."""

_RADII = (3, 2, 1)


@dataclass
class Matching:
    """Pairs of nodes.

    Attributes:
        pairs: for each matched node of the first graph, that of the second.
        back: the same the other way round.
        evidence: what each node of the first graph was matched by.
    """

    pairs: dict[ir.Node, ir.Node] = field(default_factory=dict)
    back: dict[ir.Node, ir.Node] = field(default_factory=dict)
    evidence: dict[ir.Node, Evidence] = field(default_factory=dict)

    def add(self, before: ir.Node, after: ir.Node, evidence: Evidence) -> bool:
        """Match two nodes if neither is matched yet; return whether it was done."""
        if before in self.pairs or after in self.back:
            return False
        self.pairs[before], self.back[after], self.evidence[before] = after, before, evidence
        return True


def match(
    before: Side, after: Side, certain_pairs: Mapping[ir.Node, ir.Node], without_partner: set[ir.Node]
) -> Matching:
    """Match the nodes of two graphs.

    Args:
        before: the first graph.
        after: the second.
        certain_pairs: pairs that are certain.
        without_partner: nodes of either graph that are known to have no partner.
    """
    return _Matcher(before, after, without_partner).run(certain_pairs)


class _Matcher:
    def __init__(self, before: Side, after: Side, without_partner: set[ir.Node]) -> None:
        self.before, self.after, self.without_partner = before, after, without_partner
        self.matching = Matching()
        self.segments = align_segments(before, after)
        self.scopes = Scopes(before, after, self.segments)

    def run(self, certain_pairs: Mapping[ir.Node, ir.Node]) -> Matching:
        for before, after in certain_pairs.items():
            self.matching.add(before, after, "record")
        self._segments()
        for strict in (True, False):
            for radius in _RADII if strict else (*_RADII, 0):
                self._spread(self._unique(radius, strict))
        self._match_remainder()
        return self.matching

    def _add(self, before: ir.Node, after: ir.Node, evidence: Evidence) -> bool:
        return not {before, after} & self.without_partner and self.matching.add(before, after, evidence)

    def _segments(self) -> None:
        pairs = []
        for before, after in self.segments:
            if self.before.folding.structures[before] == self.after.folding.structures[after]:
                candidates = zip(self.before.folding.order[before], self.after.folding.order[after], strict=True)
                pairs += [pair for pair in candidates if self._add(*pair, "structure")]
        self._spread(pairs)

    def _unmatched_nodes(self) -> tuple[list[ir.Node], list[ir.Node]]:
        return (
            [
                node
                for node in self.before.nodes
                if node not in self.matching.pairs and node not in self.without_partner
            ],
            [node for node in self.after.nodes if node not in self.matching.back and node not in self.without_partner],
        )

    def _unique(self, radius: int, strict: bool) -> list[tuple[ir.Node, ir.Node]]:
        """Match nodes whose surroundings are the same and occur once in each graph; loosely, once in each segment."""
        before, after = self._unmatched_nodes()
        if not before or not after:
            return []
        numbers: dict[Hashable, int] = {}
        tables: list[dict[Hashable, list[ir.Node]]] = []
        for side, nodes, is_after in ((self.before, before, False), (self.after, after, True)):
            node_labels = labels(side, radius, strict, numbers)
            table: dict[Hashable, list[ir.Node]] = {}
            for node in nodes:
                scope = None if strict else self.scopes.scope_of(node, is_after)
                table.setdefault((node_labels[node], scope), []).append(node)
            tables.append(table)
        pairs = []
        for key, nodes in tables[0].items():
            partners = tables[1].get(key, [])
            if len(nodes) == len(partners) == 1 and self._add(nodes[0], partners[0], "surroundings"):
                pairs.append((nodes[0], partners[0]))
        return pairs

    def _spread(self, waiting: list[tuple[ir.Node, ir.Node]]) -> None:
        """Match neighbours of matched nodes, and theirs: what makes an input, readers that are alone of their kind."""
        waiting = list(waiting)
        while waiting:
            before, after = waiting.pop()
            candidates = self._makers(before, after)
            for value, twin in zip(before.outputs, after.outputs, strict=False):
                candidates += self._readers(value, twin)
            waiting += [pair for pair in candidates if self._add(*pair, "neighbours")]

    def _makers(self, before: ir.Node, after: ir.Node) -> list[tuple[ir.Node, ir.Node]]:
        twins = dict(self.after.inputs(after))
        pairs = []
        for index, value in self.before.inputs(before):
            maker, twin = value.producer(), twins[index].producer() if index in twins else None
            if maker is None or twin is None or maker in self.before.constant or twin in self.after.constant:
                continue
            if self._is_alike(maker, twin) and value.index() == twins[index].index():
                pairs.append((maker, twin))
        return pairs

    def _readers(self, before: ir.Value, after: ir.Value) -> list[tuple[ir.Node, ir.Node]]:
        tables: list[dict[Hashable, list[ir.Node]]] = []
        for side, value, matches in (
            (self.before, before, self.matching.pairs.keys()),
            (self.after, after, self.matching.back.keys()),
        ):
            table: dict[Hashable, list[ir.Node]] = {}
            for node, index in side.readers.get(value, ()):
                if node not in matches:
                    table.setdefault((side.operation(node), index), []).append(node)
            tables.append(table)
        candidates = ((tables[0][key], tables[1][key]) for key in tables[0].keys() & tables[1].keys())
        return [(nodes[0], twins[0]) for nodes, twins in candidates if len(nodes) == len(twins) == 1]

    def _match_remainder(self) -> None:
        """Match what is left by the neighbours that it shares, the most alike first."""
        pairs = sorted(self._similar_pairs(*self._unmatched_nodes()), key=lambda pair: pair[:2], reverse=True)
        for _, _, node, twin in pairs:
            if self._add(node, twin, "similarity"):
                self._spread([(node, twin)])

    def _similar_pairs(
        self, before: list[ir.Node], after: list[ir.Node]
    ) -> Iterator[tuple[int, int, ir.Node, ir.Node]]:
        """Yield pairs of nodes that share neighbours, as (how alike they are, -place, node, node)."""
        neighbours = {node: self._neighbours(node, self.after) for node in after}
        by_neighbour: dict[Hashable, list[ir.Node]] = {}
        for node, keys in neighbours.items():
            for key in keys:
                by_neighbour.setdefault(key, []).append(node)
        for number, node in enumerate(before):
            keys = {
                (self.matching.pairs[neighbour], inward, index)
                for neighbour, inward, index in self._neighbours(node, self.before)
                if neighbour in self.matching.pairs
            }
            for twin in dict.fromkeys(twin for key in keys for twin in by_neighbour.get(key, ())):
                common_keys, is_alike = keys & neighbours[twin], self._is_alike(node, twin)
                # Another operator, but between the same neighbours, may be a partner too.
                if is_alike or len({inward for _, inward, _ in common_keys}) == 2:
                    yield len(common_keys) + 2 * is_alike, -number, node, twin

    def _is_alike(self, before: ir.Node, after: ir.Node) -> bool:
        return self.before.operation(before) == self.after.operation(after)

    @staticmethod
    def _neighbours(node: ir.Node, side: Side) -> set[tuple[ir.Node, bool, int]]:
        inward = {(v.producer(), True, index) for index, v in side.inputs(node) if v.producer() is not None}
        reading = (neighbour for value in node.outputs for neighbour in side.readers.get(value, ()))
        return {(neighbour, True, index) for neighbour, _, index in inward if neighbour is not None} | {
            (neighbour, False, index) for neighbour, index in reading
        }
