"""The layers of a graph: its segments, their structures, and which of them repeat."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from graphopt.analysis.structure.folding.canonical import Writer, intern_structures
from graphopt.analysis.structure.folding.labels import parameters_of
from graphopt.analysis.structure.folding.lockstep import divide
from graphopt.analysis.structure.folding.mixers import mixers
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
            return [instance for part in self.parts if isinstance(part, Repeat) for instance in _innermost(part)]
        gaps = Counter(after - before for before, after in pairwise(starts))
        length = gaps.most_common(1)[0][0] if gaps else 2
        ends = [*starts[1:], len(self.segments)]
        return [range(start, min(end, start + length)) for start, end in zip(starts, ends, strict=True)]

    def layer_of(self) -> dict[ir.Node, int]:
        """Return the layer of each node that is in one."""
        layer_of = {segment: number for number, layer in enumerate(self.layers()) for segment in layer}
        return {node: layer_of[segment] for node, segment in self.cuts.segment_of.items() if segment in layer_of}


def fold(graph: ir.Graph, numbers: dict[Hashable, int] | None = None) -> Folding:
    """Find the repeated layers of a graph.

    Args:
        graph: the graph.
        numbers: of structures and parameters; graphs that are folded with the same ones can be compared by them.
    """
    cuts, numbers = cut(graph, divide), {} if numbers is None else numbers
    writer = Writer(graph, cuts, numbers)
    lines = [writer.write(segment) for segment in cuts.segments]
    structures = intern_structures((("structure", structure) for _, structure in lines), numbers)
    order = [nodes for nodes, _ in lines]
    storage = intern_structures((("stored", _storage(segment.nodes)) for segment in cuts.segments), numbers)
    attends = [bool(mixers(nodes)) for nodes in order]
    is_start = attends if any(attends) else [any(map(is_product, nodes)) for nodes in order]
    return Folding(cuts, structures, storage, order, repeats(structures, is_start))


def _storage(nodes: list[ir.Node]) -> Hashable:
    keys = (parameters_of(node) for node in nodes)
    return tuple(sorted((key for key in keys if key is not None), key=repr))


def _innermost(repeat: Repeat) -> Iterator[range]:
    for number in range(repeat.count):
        offset = number * repeat.length
        inner = [part for part in repeat.unit if isinstance(part, Repeat)]
        if not inner:
            yield range(repeat.start + offset, repeat.start + offset + repeat.length)
        for repeat_inside in inner:
            yield from (range(r.start + offset, r.stop + offset) for r in _innermost(repeat_inside))
