"""A tensor that is filled slice by slice becomes the ``Concat`` of the slices.

    x = ConstantOfShape(...);  x[..., :a] = p;  x[..., a:] = q                      in torch, so in an export
    Transpose(ScatterND(ScatterND(Transpose(x), [0 .. a], Transpose(p)), [a ..], Transpose(q)))
      ->   Concat(p, q)

Each transpose of a slice exchanges the first axis with the one that is filled, and so does the one behind; or that one
exchanges others besides, as keys are turned before a product, and a transpose is left. What was there before does not
matter where the slices fill all of the axis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from graphopt.graph.diagnostics import Rule
from graphopt.graph.editing import replace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.passes.context import Ledger

SLICES_JOINED = Rule("canonicalize.filled", "a tensor that was filled slice by slice became the Concat of the slices")


class _Piece(NamedTuple):
    """What fills a tensor from ``start`` to ``end`` of its first axis, exchanged with another by ``exchange``."""

    start: int
    end: int
    value: ir.Value
    exchange: tuple[int, ...]


def lift_scatters(model: ir.Model, ledger: Ledger) -> None:
    """Let every tensor that is filled slice by slice be a ``Concat``."""
    for node in list(model.graph):
        if node.op_type != "Transpose" or node.domain or node.graph is None or node.inputs[0] is None:
            continue
        pieces = _pieces(node.inputs[0])
        if not pieces:
            continue
        exchange = pieces[0].exchange
        values = [piece.value for piece in sorted(pieces, key=lambda piece: piece.start)]
        concat = ir.node("Concat", values, {"axis": exchange[0]}, name=f"{node.name}.Concat")
        turns = [exchange[axis] for axis in node.attributes.get_ints("perm", ())]
        if turns == sorted(turns):
            replace(node, concat)
        else:
            _turn(node, concat, turns)
        ledger.changed(concat, SLICES_JOINED(), [node])


def _turn(node: ir.Node, concat: ir.Node, turns: list[int]) -> None:
    """Put a transpose of ``concat`` in the place of ``node``."""
    graph, output, tensor = node.graph, node.outputs[0], concat.outputs[0]
    assert graph is not None
    dims = [None] * len(turns) if output.shape is None else list(output.shape)
    tensor.name, tensor.type = f"{concat.name}.output", output.type
    tensor.shape = ir.Shape([dims[turns.index(axis)] for axis in range(len(turns))])
    graph.insert_before(node, concat)
    replace(node, ir.node("Transpose", [tensor], {"perm": turns}, name=node.name))


def _is_exchange(perm: Sequence[int]) -> bool:
    """Return whether a transpose exchanges another axis with the first one, leaving all others."""
    order = list(range(len(perm)))
    if not perm or not perm[0]:
        return False
    order[0], order[perm[0]] = perm[0], 0
    return tuple(order) == tuple(perm)


def _pieces(value: ir.Value) -> list[_Piece] | None:
    """Return the slices that fill all of the first axis of ``value``, or ``None``."""
    pieces: list[_Piece] = []
    size = None if value.shape is None else value.shape[0]
    node, end_of_known = value.producer(), 0
    while node is not None and node.op_type == "ScatterND" and not node.domain and isinstance(size, int):
        piece = _piece(node, size)
        if piece is None or node.attributes.get_string("reduction", "none") != "none":
            return None
        pieces.append(piece)
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.start != end_of_known or piece.exchange != pieces[0].exchange:
            return None
        end_of_known = piece.end
    return pieces if pieces and end_of_known == size else None


def _piece(node: ir.Node, size: int) -> _Piece | None:
    """Return what one ``ScatterND`` puts along the first axis of its data, which has ``size`` entries."""
    indices, updates = node.inputs[1], node.inputs[2]
    transpose = None if updates is None else updates.producer()
    if transpose is None or transpose.op_type != "Transpose" or transpose.inputs[0] is None:
        return None
    source, exchange = transpose.inputs[0], tuple(transpose.attributes.get_ints("perm", ()))
    if not _is_exchange(exchange):
        return None
    span = _span(indices, size)
    width = None if updates is None or updates.shape is None else updates.shape[0]
    return _Piece(*span, source, exchange) if span is not None and width == span[1] - span[0] else None


def _span(indices: ir.Value | None, size: int) -> tuple[int, int] | None:
    """Return the start and end of consecutive indices [n, 1]: a constant, or Unsqueeze(Slice(Range(0, size, 1)))."""
    if indices is not None and indices.const_value is not None:
        positions = np.asarray(indices.const_value.numpy())
        start = int(positions.flat[0]) if positions.size else 0
        is_span = np.array_equal(positions, np.arange(start, start + len(positions))[:, None])
        return (start, start + len(positions)) if is_span and start >= 0 else None
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
