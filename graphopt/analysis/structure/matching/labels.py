"""What surrounds a node, up to a number of edges, as a number: the same for nodes with the same surroundings.

Each round adds the labels of the nodes that a node reads, by place, and of those that read it (Weisfeiler and Leman,
1968). Strict labels have attributes and the numbers of constants in them, loose ones only operators and shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.analysis.structure.folding.labels import dims
from graphopt.analysis.structure.matching.side import Side, kind

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    import onnx_ir as ir


def labels(side: Side, radius: int, strict: bool, numbers: dict[Hashable, int]) -> dict[ir.Node, int]:
    """Return the label of each node.

    Args:
        side: the graph.
        radius: edges that are looked along.
        strict: whether attributes and numbers count.
        numbers: of labels; labels of two graphs that are numbered with the same ones can be compared.
    """
    found = {node: numbers.setdefault(_own(side, node, strict), len(numbers)) for node in side.nodes}
    for _ in range(radius):
        found = {node: numbers.setdefault(_around(side, node, found), len(numbers)) for node in side.nodes}
    return found


def _own(side: Side, node: ir.Node, strict: bool) -> Hashable:
    reads = []
    for place, value in side.inputs(node):
        if side.is_constant(value) and not strict and side.is_product(node):
            continue  # how its matrix is stored is another matter
        if side.is_constant(value):
            reads.append((place, side.constant_key(value) if strict else dims(value)))
        elif value.producer() is None:
            reads.append((place, ("port", value.dtype, dims(value))))
    outward = tuple(value.is_graph_output() for value in node.outputs)
    return (kind(node) if strict else side.does(node)), tuple(reads), outward


def _around(side: Side, node: ir.Node, found: dict[ir.Node, int]) -> Hashable:
    reads = tuple(
        (place, found[producer], value.index())
        for place, value in side.inputs(node)
        if (producer := value.producer()) is not None and producer in found
    )
    readers = (
        (number, found[reader], place)
        for number, value in enumerate(node.outputs)
        for reader, place in side.readers.get(value, ())
    )
    return found[node], reads, tuple(sorted(readers))


class Scopes:
    """Where a node may have its partner: in the segment that its own is aligned with, or among what segments share.

    Args:
        before: the first graph.
        after: the second.
        segments: their segments, aligned.
    """

    def __init__(self, before: Side, after: Side, segments: Iterable[tuple[int, int]]) -> None:
        self._of = (before.folded.cuts.of, after.folded.cuts.of)
        self._partner = {theirs: ours for ours, theirs in segments}

    def of(self, node: ir.Node, other: bool) -> Hashable:
        """Return the scope of a node of the first graph, or of the ``other``."""
        number = self._of[other].get(node)
        if number is None or not other:
            return number
        return self._partner.get(number, ("alone", number))
