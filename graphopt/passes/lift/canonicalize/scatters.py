"""A tensor that is filled slice by slice becomes the ``Concat`` of the slices.

    x = ConstantOfShape(...);  x[..., :a] = p;  x[..., a:] = q                      in torch, so in an export
    Transpose(ScatterND(ScatterND(Transpose(x), [0 .. a], Transpose(p)), [a ..], Transpose(q)))
      ->   Concat(p, q)

Each transpose exchanges the first axis with the one that is filled. What was there before does not matter where the
slices fill all of the axis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from graphopt.graph.diagnostics import Rule
from graphopt.graph.editing import replace

if TYPE_CHECKING:
    from graphopt.passes.context import Ledger

SLICES_JOINED = Rule("canonicalize.filled", "a tensor that was filled slice by slice became the Concat of the slices")


class _Piece(NamedTuple):
    """What fills a tensor from ``start`` to ``end`` of its first axis, which was exchanged with another."""

    start: int
    end: int
    value: ir.Value


def lift_scatters(model: ir.Model, ledger: Ledger) -> None:
    """Let every tensor that is filled slice by slice be a ``Concat``."""
    for node in list(model.graph):
        if node.op_type != "Transpose" or node.domain or node.graph is None or node.inputs[0] is None:
            continue
        axis = _exchanged_axis(node)
        pieces = None if axis is None else _pieces(node.inputs[0], node)
        if axis is None or not pieces:
            continue
        values = [piece.value for piece in sorted(pieces, key=lambda piece: piece.start)]
        concat = ir.node("Concat", values, {"axis": axis}, name=f"{node.name}.Concat")
        replace(node, concat)
        ledger.changed(concat, SLICES_JOINED(), [node])


def _exchanged_axis(node: ir.Node) -> int | None:
    """Return the axis that a transpose exchanges with the first one, leaving all others."""
    perm = tuple(node.attributes.get_ints("perm", ()))
    axis = perm[0] if perm else 0
    order = list(range(len(perm)))
    if not axis:
        return None
    order[0], order[axis] = axis, 0
    return axis if tuple(order) == perm else None


def _pieces(value: ir.Value, last: ir.Node) -> list[_Piece] | None:
    """Return the slices that fill all of the first axis of ``value``, or ``None``."""
    pieces: list[_Piece] = []
    size = None if value.shape is None else value.shape[0]
    node, end_of_known = value.producer(), 0
    while node is not None and node.op_type == "ScatterND" and not node.domain and isinstance(size, int):
        piece = _piece(node, size, last)
        if piece is None or node.attributes.get_string("reduction", "none") != "none":
            return None
        pieces.append(piece)
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.start != end_of_known:
            return None
        end_of_known = piece.end
    return pieces if pieces and end_of_known == size else None


def _piece(node: ir.Node, size: int, last: ir.Node) -> _Piece | None:
    """Return what one ``ScatterND`` puts along the first axis of its data, which has ``size`` entries."""
    indices, updates = node.inputs[1], node.inputs[2]
    transpose = None if updates is None else updates.producer()
    if transpose is None or transpose.op_type != "Transpose" or transpose.inputs[0] is None:
        return None
    source = transpose.inputs[0]
    if tuple(transpose.attributes.get_ints("perm", ())) != tuple(last.attributes.get_ints("perm", ())):
        return None
    span = _span(indices, size)
    width = None if updates is None or updates.shape is None else updates.shape[0]
    return _Piece(*span, source) if span is not None and width == span[1] - span[0] else None


def _span(indices: ir.Value | None, size: int) -> tuple[int, int] | None:
    """Return the first and the last but one of consecutive indices [n, 1]: Unsqueeze(Slice(Range(0, size, 1)))."""
    unsqueeze = None if indices is None else indices.producer()
    if unsqueeze is None or unsqueeze.op_type != "Unsqueeze" or unsqueeze.inputs[0] is None:
        return None
    cut = unsqueeze.inputs[0].producer()
    start, end = 0, size
    if cut is not None and cut.op_type == "Slice":
        numbers = [_number(value) for value in cut.inputs[1:]]
        if len(numbers) < 2 or None in numbers or numbers[2:] not in ([], [0], [0, 1]):
            return None
        start, end, *_ = slice(numbers[0], numbers[1]).indices(size)
        cut = None if cut.inputs[0] is None else cut.inputs[0].producer()
    if cut is None or cut.op_type != "Range" or (_number(cut.inputs[0]), _number(cut.inputs[2])) != (0, 1):
        return None
    return (start, end) if _length(cut.inputs[1]) == size else None


def _length(value: ir.Value | None) -> int | None:
    """Return a constant, or a dimension that is one: Gather(Shape(x), i)."""
    number = _number(value)
    gather = None if value is None else value.producer()
    if number is not None or gather is None or gather.op_type != "Gather" or gather.inputs[0] is None:
        return number
    shape, index = gather.inputs[0].producer(), _number(gather.inputs[1])
    if shape is None or shape.op_type != "Shape" or index is None:
        return None
    x, start = shape.inputs[0], shape.attributes.get_int("start", 0)
    index += start
    dim = None if x is None or x.shape is None or not 0 <= index < len(x.shape) else x.shape[index]
    return dim if isinstance(dim, int) else None


def _number(value: ir.Value | None) -> int | None:
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    return int(np.asarray(value.const_value.numpy()).reshape(-1)[0])
