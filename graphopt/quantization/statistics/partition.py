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

    def part(self, model: ir.Model, extra_inputs: Sequence[ir.Value] = ()) -> ir.Model:
        """Return the piece as a model of its own; its outputs are the taps, then what is computed of the boundary.

        Args:
            model: whose piece it is.
            extra_inputs: values of the piece that are inputs, too; what only they need is left out.
        """
        outputs = [*self.taps, *(value for value in self.boundary_outputs if value not in extra_inputs)]
        graph = ir.convenience.extract(model.graph, [*model.graph.inputs, *self.before, *extra_inputs], outputs)
        for port in [value for value in graph.inputs if not value.uses() and not value.is_graph_output()]:
            graph.inputs.remove(port)
        # Shapes that were inferred may name dimensions that this part does not know.
        for value in graph.inputs:
            value.shape = None if value.shape is None else ir.Shape([None] * value.shape.rank())
        for value in graph.outputs:
            value.dtype, value.shape = value.dtype or ir.DataType.FLOAT, None
        model_of_part = ir.Model(graph, ir_version=model.ir_version)
        declare(model_of_part)
        return model_of_part

    @property
    def boundary_outputs(self) -> list[ir.Value]:
        """What the part computes of its boundary, and is no tap; the rest is handed on."""
        inputs = {*self.taps, *self.before}
        return [value for value in self.boundary if value not in inputs]


def pieces_of(graph: ir.Graph, taps: Sequence[ir.Value], limit: int) -> list[Piece]:
    """Cut a graph so that the Hessians of a piece's taps take at most ``limit`` bytes, or there is one tap.

    Args:
        graph: its nodes stand in an order in which they can run.
        taps: the values whose numbers are asked for, [..., rows].
        limit: bytes.
    """
    positions = {node: number for number, node in enumerate(graph)}
    taps_in_order = sorted(taps, key=lambda tap: _position(tap, positions))
    groups: list[list[ir.Value]] = []
    room = 0
    for tap in taps_in_order:
        size = 8 * _rows(tap) ** 2
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(tap)
        room -= size
    pieces: list[Piece] = []
    before: tuple[ir.Value, ...] = ()
    for number, group in enumerate(groups):
        cut = max(_position(tap, positions) for tap in group)
        later = [tap for group_after in groups[number + 1 :] for tap in group_after]
        boundary = tuple(_frontier(later, cut, positions))
        pieces.append(Piece(tuple(group), boundary, before))
        before = boundary
    return pieces


def _frontier(targets: Iterable[ir.Value], cut: int, positions: dict[ir.Node, int]) -> list[ir.Value]:
    """Return what nodes up to ``cut`` compute and ``targets`` needs. A value of no known type is computed again."""
    frontier: dict[ir.Value, None] = {}
    closure: set[ir.Value] = set()
    waiting = list(targets)
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if value in closure or node is None:
            continue
        closure.add(value)
        if positions[node] <= cut and value.dtype is not None and node.op_type != "Constant":
            frontier[value] = None
        else:
            waiting.extend(operand for operand in node.inputs if operand is not None)
    return sorted(frontier, key=lambda value: value.name or "")


def _position(value: ir.Value, positions: dict[ir.Node, int]) -> int:
    node = value.producer()
    return -1 if node is None else positions[node]


def _rows(tap: ir.Value) -> int:
    weights = (use.node.inputs[1] for use in tap.uses() if use.node.op_type == "MatMul" and use.idx == 0)
    sizes = [weight.const_value.shape[0] for weight in weights if weight is not None and weight.const_value is not None]
    return max((size for size in sizes if isinstance(size, int)), default=0)


def columns_of(tap: ir.Value) -> int:
    """Return how many numbers of a token a product reads, where that is known."""
    size = tap.shape[-1] if tap.shape is not None and len(tap.shape) else 0
    return size if isinstance(size, int) else 0
