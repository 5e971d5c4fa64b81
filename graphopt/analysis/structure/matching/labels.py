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
    numbers_of_nodes = {node: numbers.setdefault(_node_label(side, node, strict), len(numbers)) for node in side.nodes}
    for _ in range(radius):
        numbers_of_nodes = {
            node: numbers.setdefault(_label_with_neighbours(side, node, numbers_of_nodes), len(numbers))
            for node in side.nodes
        }
    return numbers_of_nodes


def _node_label(side: Side, node: ir.Node, strict: bool) -> Hashable:
    reads = []
    for index, value in side.inputs(node):
        if side.is_constant(value) and not strict and side.is_product(node):
            continue  # how its matrix is stored is another matter
        if side.is_constant(value):
            reads.append((index, side.constant_key(value) if strict else dims(value)))
        elif value.producer() is None:
            reads.append((index, ("port", value.dtype, dims(value))))
    outward = tuple(value.is_graph_output() for value in node.outputs)
    return (kind(node) if strict else side.operation(node)), tuple(reads), outward


def _label_with_neighbours(side: Side, node: ir.Node, node_labels: dict[ir.Node, int]) -> Hashable:
    reads = tuple(
        (index, node_labels[producer], value.index())
        for index, value in side.inputs(node)
        if (producer := value.producer()) is not None and producer in node_labels
    )
    readers = (
        (number, node_labels[reader], index)
        for number, value in enumerate(node.outputs)
        for reader, index in side.readers.get(value, ())
    )
    return node_labels[node], reads, tuple(sorted(readers))


class Scopes:
    """Where a node may have its partner: in the segment that its own is aligned with, or among what segments share.

    Args:
        before: the first graph.
        after: the second.
        segments: their segments, aligned.
    """

    def __init__(self, before: Side, after: Side, segments: Iterable[tuple[int, int]]) -> None:
        self._segment_of = (before.folding.cuts.segment_of, after.folding.cuts.segment_of)
        self._partner = {after_number: before_number for before_number, after_number in segments}

    def scope_of(self, node: ir.Node, is_after: bool) -> Hashable:
        """Return the scope of a node of the first graph, or of the ``is_after``."""
        number = self._segment_of[is_after].get(node)
        if number is None or not is_after:
            return number
        return self._partner.get(number, ("alone", number))
