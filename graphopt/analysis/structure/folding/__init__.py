"""Repeated layers of a graph, found by structure alone: names are labels.

    embedding, ((attention, MLP) x 5, (wide attention, MLP)) x 4, norm, lm_head

Nodes that every path from tokens to logits crosses cut the graph into segments (:mod:`.trunk`); where there are few of
them, equal groups grow in lockstep (:mod:`.lockstep`). Segments are compared exactly, by structure (:mod:`.canonical`);
by what their numbers are stored in they may differ. Repeats are found in the string of structures, nested
(:mod:`.repeats`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from graphopt.analysis.structure.folding.canonical import Writer, interned
from graphopt.analysis.structure.folding.labels import parameters_of
from graphopt.analysis.structure.folding.lockstep import divided
from graphopt.analysis.structure.folding.mixers import Mixer, mixers
from graphopt.analysis.structure.folding.repeats import Part, Repeat, repeats
from graphopt.analysis.structure.folding.trunk import Cuts, Segment, cut, is_product

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    import onnx_ir as ir


@dataclass
class Folding:
    """The repeated layers of a graph.

    Attributes:
        cuts: the segments, and what they share.
        structures: the structure of each segment as a number: the same for isomorphic ones.
        parameters: what the numbers of each segment are stored in, as a number.
        order: the nodes of each segment in an order that isomorphic segments have in common.
        parts: the string of structures, folded.
    """

    cuts: Cuts
    structures: list[int]
    parameters: list[int]
    order: list[list[ir.Node]]
    parts: list[Part]

    @property
    def segments(self) -> list[Segment]:
        """From tokens to logits."""
        return self.cuts.segments

    def layers(self) -> list[range]:
        """Return the segments of each layer.

        A layer begins with the segment that attends to other tokens. In a graph without attention each instance of an
        innermost repeat is a layer. What is behind the last layer belongs to none.
        """
        starts = [number for number, nodes in enumerate(self.order) if mixers(nodes)]
        if not starts:
            return [each for part in self.parts if isinstance(part, Repeat) for each in _innermost(part)]
        gaps = Counter(after - before for before, after in pairwise(starts))
        usual = gaps.most_common(1)[0][0] if gaps else 2
        ends = [*starts[1:], len(self.segments)]
        return [range(start, min(end, start + usual)) for start, end in zip(starts, ends, strict=True)]

    def layer_of(self) -> dict[ir.Node, int]:
        """Return the layer of each node that is in one."""
        of = {segment: number for number, layer in enumerate(self.layers()) for segment in layer}
        return {node: of[segment] for node, segment in self.cuts.of.items() if segment in of}


def fold(graph: ir.Graph, numbers: dict[Hashable, int] | None = None) -> Folding:
    """Find the repeated layers of a graph.

    Args:
        graph: the graph.
        numbers: of structures and parameters; graphs that are folded with the same ones can be compared by them.
    """
    cuts, numbers = cut(graph, divided), {} if numbers is None else numbers
    writer = Writer(graph, cuts, numbers)
    written = [writer.written(segment) for segment in cuts.segments]
    structures = interned((("structure", structure) for _, structure in written), numbers)
    order = [nodes for nodes, _ in written]
    stored = interned((("stored", _stored(segment.nodes)) for segment in cuts.segments), numbers)
    attends = [bool(mixers(nodes)) for nodes in order]
    wanted = attends if any(attends) else [any(map(is_product, nodes)) for nodes in order]
    return Folding(cuts, structures, stored, order, repeats(structures, wanted))


def _stored(nodes: list[ir.Node]) -> Hashable:
    found = (parameters_of(node) for node in nodes)
    return tuple(sorted((each for each in found if each is not None), key=repr))


def _innermost(repeat: Repeat) -> Iterator[range]:
    for number in range(repeat.count):
        offset = number * repeat.length
        inner = [part for part in repeat.unit if isinstance(part, Repeat)]
        if not inner:
            yield range(repeat.start + offset, repeat.start + offset + repeat.length)
        for each in inner:
            yield from (range(r.start + offset, r.stop + offset) for r in _innermost(each))


__all__ = ["Cuts", "Folding", "Mixer", "Part", "Repeat", "Segment", "fold", "mixers"]
