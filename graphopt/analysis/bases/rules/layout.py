"""Ops that move entries without looking at them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.bases.axes import Axis, BasisGraph, static_size
from graphopt.analysis.bases.pins import COPIES, CUT_UNKNOWN, MADE_OF_PARTS, MIXED_AXES, PART_OF_CONCAT, SINGLE_ENTRIES
from graphopt.analysis.bases.rules.common import has_ranks, integers, join_through, observe, rank, unary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@unary
def regroup(bases: BasisGraph, node: ir.Node, x: ir.Value, y: ir.Value) -> None:
    """``Reshape``: an axis goes on, is taken apart into factors, or is made of them."""
    before, after = list(x.shape or ()), list(y.shape or ())
    for ins_run, outs_run in _groups(before, after):
        ins, outs = _wide_axes(bases, x, ins_run), _wide_axes(bases, y, outs_run)
        is_static = all(static_size(dim) is not None for dim in (*before[ins_run], *after[outs_run]))
        match len(ins), len(outs), is_static:
            case 1, 1, _:
                bases.join(ins[0], outs[0], node)
            case 1, count, True if count > 1:
                bases.refine("product", ins[0], outs, node, "observed")
            case count, 1, True if count > 1:
                bases.refine("product", outs[0], ins, node, "made")
            case _:
                bases.pin_axes(ins, node, MIXED_AXES(op=node.op_type), "observed")
                bases.pin_axes(outs, node, MIXED_AXES(op=node.op_type), "made")


def _wide_axes(bases: BasisGraph, value: ir.Value, run: slice) -> list[Axis]:
    """Return those axes of a run that have more than one entry: the others hold no basis."""
    return [axis for axis, dim in zip(bases.axes(value)[run], list(value.shape or ())[run], strict=True) if dim != 1]


def _groups(before: Sequence[object], after: Sequence[object]) -> Iterator[tuple[slice, slice]]:
    """Yield runs of axes that hold the same entries, from the back; one run takes all from an unknown size on."""
    i, j = len(before), len(after)
    while i and j:
        starts = _start_of_runs(before[:i], after[:j])
        if starts is None:
            break
        yield slice(starts[0], i), slice(starts[1], j)
        i, j = starts
    if i or j:
        yield slice(0, i), slice(0, j)


def _start_of_runs(before: Sequence[object], after: Sequence[object]) -> tuple[int, int] | None:
    """Return where the shortest runs of last axes begin that hold the same entries; ``None`` if a size is unknown."""
    i, j = len(before) - 1, len(after) - 1
    if _is_same_size(before[i], after[j]):
        return i, j
    size, other_size = static_size(before[i]), static_size(after[j])
    while size is not None and other_size is not None and size != other_size:
        if size < other_size:
            i -= 1
            size = _product(size, before, i)
        else:
            j -= 1
            other_size = _product(other_size, after, j)
    return None if size is None or other_size is None else (i, j)


def _product(size: int, dims: Sequence[object], index: int) -> int | None:
    factor = static_size(dims[index]) if index >= 0 else None
    return None if factor is None else size * factor


def _is_same_size(before: object, after: object) -> bool:
    """Return whether two dimensions are known to be equal: the same number, or the same symbol."""
    if isinstance(before, ir.SymbolicDim) and isinstance(after, ir.SymbolicDim):
        return before.value is not None and before.value == after.value
    return static_size(before) is not None and static_size(before) == static_size(after)


@unary
def transpose(bases: BasisGraph, node: ir.Node, x: ir.Value, y: ir.Value) -> None:
    """``Transpose``: the same axes in another order."""
    order = node.attributes.get_ints("perm", ()) or tuple(reversed(range(rank(x))))
    for after, before in enumerate(order):
        bases.join(bases.axis(x, before), bases.axis(y, after), node)


@unary
def expand(bases: BasisGraph, node: ir.Node, x: ir.Value, y: ir.Value) -> None:
    """``Expand``: axes that stay go on; one that grows holds copies."""
    assert x.shape is not None and y.shape is not None
    for index in range(-rank(y), 0):
        grows = -index > rank(x) or (x.shape[index] == 1 and y.shape[index] != 1)
        if grows:
            bases.pin(bases.axis(y, index), node, COPIES(), "made")
            bases.pin(bases.axis(y, index), node, COPIES(), "observed")
        else:
            bases.join(bases.axis(x, index), bases.axis(y, index), node)


def split(bases: BasisGraph, node: ir.Node) -> None:
    """``Split``: the axis is taken apart into the parts that come out."""
    x = node.inputs[0]
    if x is None or not has_ranks(x, *node.outputs):
        observe(bases, node)
        return
    axis = node.attributes.get_int("axis", 0) % rank(x)
    for y in node.outputs:
        join_through(bases, node, x, y, but=[axis])
    parts = [bases.axis(y, axis) for y in node.outputs]
    _sum(bases, node, bases.axis(x, axis), parts)


def _sum(bases: BasisGraph, node: ir.Node, whole: Axis, parts: Sequence[Axis | int]) -> None:
    sizes = [part if isinstance(part, int) else bases.width(part) for part in parts]
    numbers = [size for size in sizes if size is not None]
    if len(numbers) == len(sizes) and bases.width(whole) == sum(numbers):
        bases.refine("sum", whole, parts, node, "observed")
    else:
        reason = CUT_UNKNOWN(op=node.op_type)
        bases.pin(whole, node, reason, "observed")
        bases.pin_axes([part for part in parts if not isinstance(part, int)], node, reason, "made")


@unary
def slice_axes(bases: BasisGraph, node: ir.Node, x: ir.Value, y: ir.Value) -> None:
    """``Slice``: a contiguous piece of an axis is a part of it; along other axes nothing happens."""
    starts, ends, axes, steps = (integers(node, index) for index in range(1, 5))
    axes = axes if _has_input(node, 3) else list(range(len(starts or ())))
    if axes is None:
        observe(bases, node)
        return
    axes = [axis % rank(x) for axis in axes]
    steps = steps if _has_input(node, 4) else [1] * len(axes)
    join_through(bases, node, x, y, but=axes)
    pieces: list[slice | None] = [None] * len(axes)
    if starts is not None and ends is not None and steps is not None:
        pieces = [slice(*bounds) for bounds in zip(starts, ends, steps, strict=True)]
    for axis, piece in zip(axes, pieces, strict=True):
        _slice_axis(bases, node, bases.axis(x, axis), bases.axis(y, axis), piece)


def _has_input(node: ir.Node, index: int) -> bool:
    return index < len(node.inputs) and node.inputs[index] is not None


def _slice_axis(bases: BasisGraph, node: ir.Node, whole: Axis, part: Axis, piece: slice | None) -> None:
    width = bases.width(whole)
    if piece is None or width is None or piece.step != 1:
        bases.pin(whole, node, SINGLE_ENTRIES(), "observed")
        bases.pin(part, node, SINGLE_ENTRIES(), "made")
        return
    begin, end, _ = piece.indices(width)
    if (begin, end) == (0, width):
        bases.join(whole, part, node)
    else:
        _sum(bases, node, whole, [size for size in (begin, part, width - end) if size != 0])


def concat(bases: BasisGraph, node: ir.Node) -> None:
    """``Concat``: along the other axes, rows are put behind rows; the axis itself is made of parts and observed."""
    inputs, y = [value for value in node.inputs if value is not None], node.outputs[0]
    if not has_ranks(y, *inputs):
        observe(bases, node)
        return
    axis = node.attributes.get_int("axis", 0) % rank(y)
    for x in inputs:
        join_through(bases, node, x, y, but=[axis])
        bases.pin(bases.axis(x, axis), node, PART_OF_CONCAT(), "observed")
    bases.pin(bases.axis(y, axis), node, MADE_OF_PARTS(), "made")
