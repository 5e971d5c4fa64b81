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

import onnx_ir as ir

from graphopt.analysis.structure.folding.mixers import mixers
from graphopt.analysis.structure.folding.trunk import Division, inputs_of, readers_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

_RADIUS, _ROUNDS = 3, 3
"""Edges that neighbours are told apart by; seeds that are left out at most."""

_COVERED, _GAIN = 0.5, 1.1
"""Share of a path that layers must cover; how much more they must cover without a seed for it to be left out."""


def divided(data: Sequence[ir.Node], of: Mapping[ir.Node, int]) -> Division | None:
    """Divide a path that has too few cuts; ``None`` where it has enough, or no layers are found.

    It has too few where its segments attend more than twice on average, of those that attend.

    Args:
        data: the nodes of the path, in the order of the graph.
        of: the number of the segment of each.
    """
    counts = Counter(of[mixer.node] for mixer in mixers(data) if mixer.node in of)
    return _Divider(data).division() if counts.total() > 2 * len(counts) else None


@dataclass
class _Grown:
    """Groups that grew from seeds: the nodes of each, in the same order; and how often each stopped the others."""

    groups: list[list[ir.Node]]
    stopped: Counter[int] = field(default_factory=Counter)


class _Divider:
    def __init__(self, data: Sequence[ir.Node]) -> None:
        self.data, self.inside = data, set(data)
        self.place = {node: number for number, node in enumerate(data)}
        self.readers = readers_of(data)
        self.labels = list(_labels(data, self.readers))

    def division(self) -> Division | None:
        """Return the segment of each node, and the last nodes of segments; ``None`` where no layers are found."""
        found = [mixer.node for mixer in mixers(self.data)]
        most = Counter(map(_kind, found)).most_common(1)[0][0]
        seeds = [node for node in found if _kind(node) == most]
        if len(seeds) < 2:
            return None
        best, stopped = self._groups(seeds)
        for _ in range(_ROUNDS):
            if not stopped or len(seeds) < 3:
                break
            odd = stopped.most_common(1)[0][0]
            seeds = [seed for number, seed in enumerate(seeds) if number != odd]
            other, stopped = self._groups(seeds)
            if sum(map(len, other)) < _GAIN * sum(map(len, best)):
                break
            best = other
        return None if sum(map(len, best)) < _COVERED * len(self.data) else self._numbered(best)

    def _groups(self, seeds: Sequence[ir.Node]) -> tuple[list[list[ir.Node]], Counter[int]]:
        """Return the groups that grow from seeds, in order, with what stands inside them; and which stopped others."""
        grown = self._grow(seeds)
        ordered = sorted(grown.groups, key=lambda group: max(map(self.place.__getitem__, group)))
        return self._joined(ordered), grown.stopped

    def _grow(self, seeds: Sequence[ir.Node]) -> _Grown:
        grown = _Grown([[seed] for seed in seeds])
        taken, at = set(seeds), 0
        while at < len(grown.groups[0]):
            here = [group[at] for group in grown.groups]
            at += 1
            for step in self._steps(here):
                counts = Counter(node for node in step if node is not None)
                fresh = [node is not None and node not in taken and counts[node] == 1 for node in step]
                kinds = Counter(_kind(node) for node in step if node is not None)
                usual = kinds.most_common(1)[0][0] if kinds else None
                follows = [ok and node is not None and _kind(node) == usual
                           for ok, node in zip(fresh, step, strict=True)]  # fmt: skip
                if all(follows):
                    for group, node in zip(grown.groups, step, strict=True):
                        assert node is not None
                        group.append(node)
                        taken.add(node)
                elif 2 * sum(follows) > len(step):
                    grown.stopped.update(number for number, ok in enumerate(follows) if not ok)
        return grown

    def _steps(self, here: Sequence[ir.Node]) -> Iterator[list[ir.Node | None]]:
        """Yield for each edge of a node of the first group where the same edge leads in every group."""
        for place, value in enumerate(here[0].inputs):
            if value is not None and value.producer() in self.inside:
                yield [self._maker(node, place) for node in here]
        for reader in self.readers[here[0]]:
            yield self._same_reader(reader, here)

    def _maker(self, node: ir.Node, place: int) -> ir.Node | None:
        value = node.inputs[place] if place < len(node.inputs) else None
        maker = None if value is None else value.producer()
        return maker if maker in self.inside else None

    def _same_reader(self, reader: ir.Node, here: Sequence[ir.Node]) -> list[ir.Node | None]:
        """Return what reads each node as ``reader`` does the first: told by as few surroundings as tell it apart."""
        for labels in self.labels:
            wanted = labels[reader]
            found = [[each for each in dict.fromkeys(self.readers[node]) if labels[each] == wanted] for node in here]
            if len(found[0]) == 1:
                return [each[0] if len(each) == 1 else None for each in found]
        return [None] * len(here)

    def _numbered(self, groups: list[list[ir.Node]]) -> Division:
        """Number what is before the groups, each group cut at its own trunk, and what depends on it and is in none."""
        inside = {node for group in groups for node in group}
        behind = self._behind(groups)
        loose: dict[int, list[ir.Node]] = {}
        for node in self.data:
            if node not in inside:
                loose.setdefault(behind[node], []).append(node)
        of: dict[ir.Node, int] = {}
        ends: set[ir.Node] = set()
        parts = [loose.get(-1, [])]
        for number, group in enumerate(groups):
            cuts = self._trunk(group)
            ends.update(cuts)
            pieces: list[list[ir.Node]] = [[] for _ in range(len(cuts) + 1)]
            for node in sorted(group, key=self.place.__getitem__):
                pieces[sum(self.place[each] < self.place[node] for each in cuts)].append(node)
            parts += [*pieces, loose.get(number, [])]
        for part_number, part in enumerate(each for each in parts if each):
            of.update(dict.fromkeys(part, part_number))
        return of, ends

    def _behind(self, groups: list[list[ir.Node]]) -> dict[ir.Node, int]:
        """Return for each node the last group that it depends on, or -1."""
        group_of = {node: number for number, group in enumerate(groups) for node in group}
        behind: dict[ir.Node, int] = {}
        for node in self.data:
            makers = (value.producer() for value in inputs_of(node))
            last = max((behind[each] for each in makers if each in behind), default=-1)
            behind[node] = max(last, group_of.get(node, -1))
        return behind

    def _joined(self, groups: list[list[ir.Node]]) -> list[list[ir.Node]]:
        """Return the groups with the nodes between two of their own, such as one that not all of them have."""
        group_of = {node: number for number, group in enumerate(groups) for node in group}
        behind, groups = self._behind(groups), [list(group) for group in groups]
        for node in reversed(self.data):
            first = min((group_of.get(reader, len(groups)) for reader in self.readers[node]), default=len(groups))
            if node not in group_of and first == behind[node]:
                group_of[node] = first
                groups[first].append(node)
        return groups

    def _trunk(self, group: list[ir.Node]) -> list[ir.Node]:
        """Return the nodes of a group that every path through it crosses; what comes from outside begins before it."""
        inside, nodes = set(group), sorted(group, key=self.place.__getitem__)
        last = [n for n in nodes if any(r not in inside for r in self.readers[n]) or not self.readers[n]]
        needed, waiting = set[ir.Node](), last[-1:]
        while waiting:
            node = waiting.pop()
            needed.add(node)
            makers = (value.producer() for value in inputs_of(node))
            waiting += [each for each in makers if each in inside and each not in needed and each is not None]
        path = [node for node in nodes if node in needed]
        at = {node: number for number, node in enumerate(path)}
        outside = [
            at[node] for node in path for v in inputs_of(node) if (m := v.producer()) in self.inside and m not in inside
        ]
        farthest, found = max(outside, default=-1), list[ir.Node]()
        for number, node in enumerate(path):
            if farthest <= number:
                found.append(node)
            farthest = max([farthest, *(at[each] for each in self.readers[node] if each in at)])
        # One node after the other without a branch is no trunk of its own: a cut is where two paths meet.
        return [node for node in found if self._meets(node)]

    def _meets(self, node: ir.Node) -> bool:
        return sum(value.producer() in self.inside for value in node.inputs if value is not None) > 1


def _labels(nodes: Sequence[ir.Node], readers: dict[ir.Node, list[ir.Node]]) -> Iterator[dict[ir.Node, int]]:
    """Yield labels of the surroundings of nodes, of growing radius."""
    numbers: dict[Hashable, int] = {}
    found = {node: numbers.setdefault(_kind(node), len(numbers)) for node in nodes}
    yield found
    for _ in range(_RADIUS):
        found = {
            node: numbers.setdefault(
                (
                    found[node],
                    tuple(found.get(value.producer(), -1) for value in inputs_of(node)),  # type: ignore[arg-type]
                    tuple(sorted(found[reader] for reader in readers[node])),
                ),
                len(numbers),
            )
            for node in nodes
        }
        yield found


def _kind(node: ir.Node) -> tuple[str, str]:
    return node.domain, node.op_type
