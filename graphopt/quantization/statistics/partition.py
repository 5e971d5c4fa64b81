"""A graph cut into parts that run one after the other, each on what the parts before it computed.

    inputs --> [piece 0] --> boundary --> [piece 1] --> boundary --> ...
                   |                          |
              taps of piece 0            taps of piece 1

The values at a boundary are written to disk, so memory holds the weights and the sums of one piece at a time, and every
node runs once for each text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime_ops import declare

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class Piece:
    """Consecutive nodes of a graph.

    Attributes:
        taps: values whose numbers are asked for.
        boundary: values that later pieces need besides: what the part computes, and what is handed on through it.
        before: the boundary of the piece before.
    """

    taps: tuple[ir.Value, ...]
    boundary: tuple[ir.Value, ...]
    before: tuple[ir.Value, ...]

    def part(self, model: ir.Model) -> ir.Model:
        """Return the piece as a model of its own; its outputs are the taps, then what is computed of the boundary."""
        outputs = [*self.taps, *self.computed]
        graph = ir.convenience.extract(model.graph, [*model.graph.inputs, *self.before], outputs)
        for unused in [value for value in graph.inputs if not value.uses() and not value.is_graph_output()]:
            graph.inputs.remove(unused)
        # Shapes that were inferred may name dimensions that this part does not know.
        for value in graph.inputs:
            value.shape = None if value.shape is None else ir.Shape([None] * value.shape.rank())
        for value in graph.outputs:
            value.dtype, value.shape = value.dtype or ir.DataType.FLOAT, None
        made = ir.Model(graph, ir_version=model.ir_version)
        declare(made)
        return made

    @property
    def computed(self) -> list[ir.Value]:
        """What the part computes of its boundary, and is no tap; the rest is handed on."""
        known = {*self.taps, *self.before}
        return [value for value in self.boundary if value not in known]


def pieces_of(graph: ir.Graph, taps: Sequence[ir.Value], limit: int) -> list[Piece]:
    """Cut a graph so that the Hessians of a piece's taps take at most ``limit`` bytes, or there is one tap.

    Args:
        graph: its nodes stand in an order in which they can run.
        taps: the values whose numbers are asked for, [..., rows].
        limit: bytes.
    """
    place = {node: number for number, node in enumerate(graph)}
    ordered = sorted(taps, key=lambda tap: _place(tap, place))
    groups: list[list[ir.Value]] = []
    room = 0
    for tap in ordered:
        size = 8 * _rows(tap) ** 2
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(tap)
        room -= size
    pieces: list[Piece] = []
    before: tuple[ir.Value, ...] = ()
    for number, group in enumerate(groups):
        cut = max(_place(tap, place) for tap in group)
        later = [tap for each in groups[number + 1 :] for tap in each]
        boundary = tuple(_frontier(later, cut, place))
        pieces.append(Piece(tuple(group), boundary, before))
        before = boundary
    return pieces


def _frontier(wanted: Iterable[ir.Value], cut: int, place: dict[ir.Node, int]) -> list[ir.Value]:
    """Return what nodes up to ``cut`` compute and ``wanted`` needs. A value of no known type is computed again."""
    found: dict[ir.Value, None] = {}
    seen: set[ir.Value] = set()
    waiting = list(wanted)
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if value in seen or node is None:
            continue
        seen.add(value)
        if place[node] <= cut and value.dtype is not None and node.op_type != "Constant":
            found[value] = None
        else:
            waiting.extend(each for each in node.inputs if each is not None)
    return sorted(found, key=lambda value: value.name or "")


def _place(value: ir.Value, place: dict[ir.Node, int]) -> int:
    node = value.producer()
    return -1 if node is None else place[node]


def _rows(tap: ir.Value) -> int:
    weights = (use.node.inputs[1] for use in tap.uses() if use.node.op_type == "MatMul" and use.idx == 0)
    sizes = [each.const_value.shape[0] for each in weights if each is not None and each.const_value is not None]
    return max((size for size in sizes if isinstance(size, int)), default=0)
