"""Who reads the rows of a value in the end, behind what only moves rows around.

    x -> Reshape [batch * length, K] -> Gather rows -> MatMul(., W)

Rows x[.., :] may be picked, repeated, reordered and counted along other leading axes: each arrives whole, so what holds
for every row of x, a gain that multiplies it or a bias that is added to it, holds for every row that W reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.graph.weights import weight_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Reader:
    """Input ``input`` of ``node``, which does more than move rows; ``None`` for the app, which reads graph outputs."""

    node: ir.Node | None
    input: int
    moved_by: tuple[str, ...]


def readers_of(value: ir.Value, moved_by: tuple[str, ...] = ()) -> Iterator[Reader]:
    """Yield what reads the rows of ``value``, each with the ops that moved them before."""
    if value.is_graph_output():
        yield Reader(None, 0, moved_by)
    for node, index in value.uses():
        if index == 0 and node.domain == "" and node.op_type in _MOVES and _MOVES[node.op_type](node):
            for output in node.outputs:
                yield from readers_of(output, (*moved_by, node.op_type))
        else:
            yield Reader(node, index, moved_by)


def _always(node: ir.Node) -> bool:
    del node
    return True


def _to_float(node: ir.Node) -> bool:
    # Not to 8 bits and fewer: what is cut off there depends on the gain.
    dtype = ir.DataType(node.attributes.get_int("to", 0))
    return dtype.is_floating_point() and dtype.bitwidth >= 16


def _keeps_width(node: ir.Node) -> bool:
    before, after = _rank_and_width(node.inputs[0])[1], _rank_and_width(node.outputs[0])[1]
    return before is not None and before == after


def _keeps_last_in_place(node: ir.Node) -> bool:
    permutation = node.attributes.get_ints("perm", ())
    return bool(permutation) and permutation[-1] == len(permutation) - 1


def _along_leading_axis(node: ir.Node) -> bool:
    rank, _ = _rank_and_width(node.inputs[0])
    return rank > 0 and node.attributes.get_int("axis", 0) % rank != rank - 1


def _picks_whole_rows(node: ir.Node) -> bool:
    rank, _ = _rank_and_width(node.inputs[0])
    _, index_shape = _rank_and_width(node.inputs[1])
    return index_shape is not None and node.attributes.get_int("batch_dims", 0) + index_shape < rank


def _cuts_leading_axes(node: ir.Node) -> bool:
    rank, _ = _rank_and_width(node.inputs[0])
    axes = weight_of(node, 3)
    return axes is not None and axes.const_value is not None and _leading(axes.const_value, rank)


def _changes_leading_axes(node: ir.Node) -> bool:
    # Squeeze counts in what comes in, Unsqueeze in what comes out.
    rank, _ = _rank_and_width(node.inputs[0] if node.op_type == "Squeeze" else node.outputs[0])
    axes = weight_of(node, 1)
    return axes is not None and axes.const_value is not None and _leading(axes.const_value, rank)


def _leading(axes: ir.TensorProtocol, rank: int) -> bool:
    return rank > 0 and all(axis % rank != rank - 1 for axis in axes.numpy().reshape(-1).tolist())


def _rank_and_width(value: ir.Value | None) -> tuple[int, int | None]:
    """Return rank and last dimension of ``value``: 0 and ``None`` where they are not known."""
    if value is None or value.shape is None or len(value.shape) == 0:
        return 0, None
    width = value.shape[-1]
    return len(value.shape), width if isinstance(width, int) else None


_MOVES: dict[str, Callable[[ir.Node], bool]] = {
    "Identity": _always,
    "Cast": _to_float,
    "Reshape": _keeps_width,
    "Transpose": _keeps_last_in_place,
    "Squeeze": _changes_leading_axes,
    "Unsqueeze": _changes_leading_axes,
    "Gather": _along_leading_axis,
    "GatherND": _picks_whole_rows,
    "Slice": _cuts_leading_axes,
    "Split": _along_leading_axis,
}
