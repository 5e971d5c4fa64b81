"""Repeated layers where few nodes are crossed by every path: equal groups grow in lockstep.

    before   [e  A0 M0 A1 M1 A2 M2  h]     one segment: values of A0 are read by A1 and A2
    seeds         A0    A1    A2           places where tokens read others
    after    [e][A0 M0][A1 M1][A2 M2][h]

All groups take a step at once: over the same edge, to a node of the same operator that is in no group yet. Where one
cannot follow, none goes on: there a layer ends. A seed that stops the others early is left out if more is covered
without it. OpenVINO's NPUW partitions graphs so, too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphopt.analysis.structure.folding.mixers import mixers
from graphopt.analysis.structure.folding.trunk import Division, crossings, inputs_of, readers_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    import onnx_ir as ir

_RADIUS, _ROUNDS = 3, 3
"""Edges that neighbours are told apart by; seeds that are left out at most."""

_LEAST_COVERAGE, _GAIN = 0.5, 1.1
"""Share of a path that layers must cover; how much more they must cover without a seed for it to be left out."""


def divide(data: Sequence[ir.Node], segment_of: Mapping[ir.Node, int]) -> Division | None:
    """Divide a path that has too few cuts; ``None`` where it has enough, or no layers are found.

    It has too few where its segments attend more than twice on average, of those that attend.

    Args:
        data: the nodes of the path, in the order of the graph.
        segment_of: the number of the segment of each.
    """
    counts = Counter(segment_of[mixer.node] for mixer in mixers(data) if mixer.node in segment_of)
    return _Divider(data).division() if counts.total() > 2 * len(counts) else None


@dataclass
class _Growth:
    """Groups that grew from seeds: the nodes of each, in the same order; and how often each stopped the others."""

    groups: list[list[ir.Node]]
    stops: Counter[int] = field(default_factory=Counter)


class _Divider:
    def __init__(self, data: Sequence[ir.Node]) -> None:
        self.data, self.inside = data, set(data)
        self.position = {node: number for number, node in enumerate(data)}
        self.readers = readers_of(data)
        self.labels = list(_labels(data, self.readers))

    def division(self) -> Division | None:
        """Return the segment of each node, and the last nodes of segments; ``None`` where no layers are found."""
        nodes = [mixer.node for mixer in mixers(self.data)]
        usual_kind = Counter(map(_kind, nodes)).most_common(1)[0][0]
        seeds = [node for node in nodes if _kind(node) == usual_kind]
        if len(seeds) < 2:
            return None
        best, stops = self._groups(seeds)
        for _ in range(_ROUNDS):
            if not stops or len(seeds) < 3:
                break
            odd = stops.most_common(1)[0][0]
            seeds = [seed for number, seed in enumerate(seeds) if number != odd]
            groups, stops = self._groups(seeds)
            if sum(map(len, groups)) < _GAIN * sum(map(len, best)):
                break
            best = groups
        return None if sum(map(len, best)) < _LEAST_COVERAGE * len(self.data) else self._number_segments(best)

    def _groups(self, seeds: Sequence[ir.Node]) -> tuple[list[list[ir.Node]], Counter[int]]:
        """Return the groups that grow from seeds, in order, with what stands inside them; and which stopped others."""
        growth = self._grow(seeds)
        groups = sorted(growth.groups, key=lambda group: max(map(self.position.__getitem__, group)))
        return self._fill_groups(groups), growth.stops

    def _grow(self, seeds: Sequence[ir.Node]) -> _Growth:
        growth = _Growth([[seed] for seed in seeds])
        members, position = set(seeds), 0
        while position < len(growth.groups[0]):
            front = [group[position] for group in growth.groups]
            position += 1
            for step in self._steps(front):
                follows = _followers(step, members)
                if all(follows):
                    nodes = [node for node in step if node is not None]
                    members.update(nodes)
                    for group, node in zip(growth.groups, nodes, strict=True):
                        group.append(node)
                elif 2 * sum(follows) > len(step):
                    growth.stops.update(number for number, follow in enumerate(follows) if not follow)
        return growth

    def _steps(self, front: Sequence[ir.Node]) -> Iterator[list[ir.Node | None]]:
        """Yield for each edge of a node of the first group where the same edge leads in every group."""
        for index, value in enumerate(front[0].inputs):
            if value is not None and value.producer() in self.inside:
                yield [self._maker(node, index) for node in front]
        for reader in self.readers[front[0]]:
            yield self._same_reader(reader, front)

    def _maker(self, node: ir.Node, index: int) -> ir.Node | None:
        value = node.inputs[index] if index < len(node.inputs) else None
        maker = None if value is None else value.producer()
        return maker if maker in self.inside else None

    def _same_reader(self, reader: ir.Node, front: Sequence[ir.Node]) -> list[ir.Node | None]:
        """Return what reads each node as ``reader`` does the first: told by as few surroundings as tell it apart."""
        for labels in self.labels:
            label = labels[reader]
            readers = [
                [candidate for candidate in dict.fromkeys(self.readers[node]) if labels[candidate] == label]
                for node in front
            ]
            if len(readers[0]) == 1:
                return [candidates[0] if len(candidates) == 1 else None for candidates in readers]
        return [None] * len(front)

    def _number_segments(self, groups: list[list[ir.Node]]) -> Division:
        """Number what is before the groups, each group cut at its own trunk, and what depends on it and is in none."""
        inside = {node for group in groups for node in group}
        last_groups = self._last_groups(groups)
        loose: dict[int, list[ir.Node]] = {}
        for node in self.data:
            if node not in inside:
                loose.setdefault(last_groups[node], []).append(node)
        segment_of: dict[ir.Node, int] = {}
        ends: set[ir.Node] = set()
        parts = [loose.get(-1, [])]
        for number, group in enumerate(groups):
            cuts = self._trunk(group)
            ends.update(cuts)
            pieces: list[list[ir.Node]] = [[] for _ in range(len(cuts) + 1)]
            for node in sorted(group, key=self.position.__getitem__):
                pieces[sum(self.position[end] < self.position[node] for end in cuts)].append(node)
            parts += [*pieces, loose.get(number, [])]
        for part_number, part in enumerate(part for part in parts if part):
            segment_of.update(dict.fromkeys(part, part_number))
        return segment_of, ends

    def _last_groups(self, groups: list[list[ir.Node]]) -> dict[ir.Node, int]:
        """Return for each node the last group that it depends on, or -1."""
        group_of = {node: number for number, group in enumerate(groups) for node in group}
        last_groups: dict[ir.Node, int] = {}
        for node in self.data:
            makers = (value.producer() for value in inputs_of(node))
            last = max((last_groups[maker] for maker in makers if maker in last_groups), default=-1)
            last_groups[node] = max(last, group_of.get(node, -1))
        return last_groups

    def _fill_groups(self, groups: list[list[ir.Node]]) -> list[list[ir.Node]]:
        """Return the groups with the nodes between two of their own, such as one that not all of them have."""
        group_of = {node: number for number, group in enumerate(groups) for node in group}
        last_groups, groups = self._last_groups(groups), [list(group) for group in groups]
        for node in reversed(self.data):
            first = min((group_of.get(reader, len(groups)) for reader in self.readers[node]), default=len(groups))
            if node not in group_of and first == last_groups[node]:
                group_of[node] = first
                groups[first].append(node)
        return groups

    def _trunk(self, group: list[ir.Node]) -> list[ir.Node]:
        """Return the nodes of a group that every path through it crosses; what comes from outside begins before it."""
        inside, nodes = set(group), sorted(group, key=self.position.__getitem__)
        last = [n for n in nodes if any(r not in inside for r in self.readers[n]) or not self.readers[n]]
        ancestors = self._ancestors(last[-1:], inside)
        path = [node for node in nodes if node in ancestors]
        position = {node: number for number, node in enumerate(path)}
        # Where what comes from other groups enters.
        entries = [position[node] for node in path if any(m not in inside for m in self._makers_on_path(node))]
        # One node after the other without a branch is no trunk of its own: a cut is where two paths meet.
        return [node for node in crossings(path, self.readers, max(entries, default=-1)) if self._meets(node)]

    def _makers_on_path(self, node: ir.Node) -> list[ir.Node]:
        makers = (value.producer() for value in inputs_of(node))
        return [maker for maker in makers if maker is not None and maker in self.inside]

    def _ancestors(self, waiting: list[ir.Node], inside: set[ir.Node]) -> set[ir.Node]:
        """Return nodes and what they are made of, within a group."""
        ancestors: set[ir.Node] = set()
        while waiting:
            node = waiting.pop()
            ancestors.add(node)
            waiting += [m for m in self._makers_on_path(node) if m in inside and m not in ancestors]
        return ancestors

    def _meets(self, node: ir.Node) -> bool:
        return sum(value.producer() in self.inside for value in node.inputs if value is not None) > 1


def _followers(step: Sequence[ir.Node | None], members: set[ir.Node]) -> list[bool]:
    """Return which groups can take a step: to a node of the usual operator that is in no group yet."""
    counts = Counter(node for node in step if node is not None)
    kinds = Counter(_kind(node) for node in step if node is not None)
    usual_kind = kinds.most_common(1)[0][0] if kinds else None
    return [
        node is not None and node not in members and counts[node] == 1 and _kind(node) == usual_kind for node in step
    ]


def _labels(nodes: Sequence[ir.Node], readers: dict[ir.Node, list[ir.Node]]) -> Iterator[dict[ir.Node, int]]:
    """Yield labels of the surroundings of nodes, of growing radius."""
    numbers: dict[Hashable, int] = {}
    labels = {node: numbers.setdefault(_kind(node), len(numbers)) for node in nodes}
    yield labels
    for _ in range(_RADIUS):
        labels = {
            node: numbers.setdefault(
                (
                    labels[node],
                    tuple(labels.get(value.producer(), -1) for value in inputs_of(node)),  # type: ignore[arg-type]
                    tuple(sorted(labels[reader] for reader in readers[node])),
                ),
                len(numbers),
            )
            for node in nodes
        }
        yield labels


def _kind(node: ir.Node) -> tuple[str, str]:
    return node.domain, node.op_type
