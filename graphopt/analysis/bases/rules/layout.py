"""Ops that move entries without looking at them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.bases.axes import Axis, BasisGraph, fixed
from graphopt.analysis.bases.pins import BESIDE, COPIES, CUT_UNKNOWN, MADE_OF_PARTS, MIXED, SINGLE_ENTRIES
from graphopt.analysis.bases.rules.common import integers, join_through, observe, rank, ranked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def regroup(found: BasisGraph, node: ir.Node) -> None:
    """``Reshape``: an axis goes on, is taken apart into factors, or is made of them."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or not ranked(x, y):
        observe(found, node)
        return
    assert x.shape is not None and y.shape is not None
    for left, right in _groups(list(x.shape), list(y.shape)):
        before, after = found.axes(x)[left], found.axes(y)[right]
        # Axes of one entry hold no basis.
        ins = [axis for axis, dim in zip(before, list(x.shape)[left], strict=True) if dim != 1]
        outs = [axis for axis, dim in zip(after, list(y.shape)[right], strict=True) if dim != 1]
        numbers = all(fixed(dim) is not None for dim in (*list(x.shape)[left], *list(y.shape)[right]))
        if len(ins) == 1 and len(outs) == 1:
            found.join(ins[0], outs[0], node)
        elif numbers and len(ins) == 1 and len(outs) > 1:
            found.refine("product", ins[0], outs, node, "observed")
        elif numbers and len(outs) == 1 and len(ins) > 1:
            found.refine("product", outs[0], ins, node, "made")
        else:
            reason = MIXED(op=node.op_type)
            for axes, side in ((ins, "observed"), (outs, "made")):
                for axis in axes:
                    found.pin(axis, node.name or "", reason, side)  # type: ignore[arg-type]


def _groups(before: Sequence[object], after: Sequence[object]) -> Iterator[tuple[slice, slice]]:
    """Yield runs of axes that hold the same entries, from the back; one run takes all from an unknown size on."""
    i, j = len(before), len(after)
    while i and j:
        begin_i, begin_j = i - 1, j - 1
        if not _same(before[begin_i], after[begin_j]):
            left, right = fixed(before[begin_i]), fixed(after[begin_j])
            while left is not None and right is not None and left != right:
                if left < right:
                    begin_i -= 1
                    step = fixed(before[begin_i]) if begin_i >= 0 else None
                    left = None if step is None else left * step
                else:
                    begin_j -= 1
                    step = fixed(after[begin_j]) if begin_j >= 0 else None
                    right = None if step is None else right * step
            if left is None or right is None:
                break
        yield slice(begin_i, i), slice(begin_j, j)
        i, j = begin_i, begin_j
    if i or j:
        yield slice(0, i), slice(0, j)


def _same(left: object, right: object) -> bool:
    """Whether two dimensions are known to be equal: the same number, or the same symbol."""
    if isinstance(left, ir.SymbolicDim) and isinstance(right, ir.SymbolicDim):
        return left.value is not None and left.value == right.value
    return fixed(left) is not None and fixed(left) == fixed(right)


def transpose(found: BasisGraph, node: ir.Node) -> None:
    """``Transpose``: the same axes in another order."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or not ranked(x, y):
        observe(found, node)
        return
    order = node.attributes.get_ints("perm", ()) or tuple(reversed(range(rank(x))))
    for after, before in enumerate(order):
        found.join(found.axis(x, before), found.axis(y, after), node)


def expand(found: BasisGraph, node: ir.Node) -> None:
    """``Expand``: axes that stay go on; one that grows holds copies."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or not ranked(x, y):
        observe(found, node)
        return
    assert x.shape is not None and y.shape is not None
    for index in range(-rank(y), 0):
        grows = -index > rank(x) or (x.shape[index] == 1 and y.shape[index] != 1)
        if grows:
            found.pin(found.axis(y, index), node.name or "", COPIES(), "made")
            found.pin(found.axis(y, index), node.name or "", COPIES(), "observed")
        else:
            found.join(found.axis(x, index), found.axis(y, index), node)


def split(found: BasisGraph, node: ir.Node) -> None:
    """``Split``: the axis is taken apart into the parts that come out."""
    x = node.inputs[0]
    if x is None or not ranked(x, *node.outputs):
        observe(found, node)
        return
    axis = node.attributes.get_int("axis", 0) % rank(x)
    for y in node.outputs:
        join_through(found, node, x, y, but=[axis])
    parts = [found.axis(y, axis) for y in node.outputs]
    _sum(found, node, found.axis(x, axis), parts)


def _sum(found: BasisGraph, node: ir.Node, whole: Axis, parts: Sequence[Axis | int]) -> None:
    sizes = [part if isinstance(part, int) else found.graph.nodes[part]["width"] for part in parts]
    if None in sizes or found.graph.nodes[whole]["width"] != sum(sizes):
        reason = CUT_UNKNOWN(op=node.op_type)
        found.pin(whole, node.name or "", reason, "observed")
        for part in parts:
            if not isinstance(part, int):
                found.pin(part, node.name or "", reason, "made")
    else:
        found.refine("sum", whole, parts, node, "observed")


def slice_(found: BasisGraph, node: ir.Node) -> None:
    """``Slice``: a contiguous piece of an axis is a part of it; along other axes nothing happens."""
    x, y = node.inputs[0], node.outputs[0]
    starts, ends = integers(node, 1), integers(node, 2)
    if x is None or not ranked(x, y):
        observe(found, node)
        return
    axes = integers(node, 3) if len(node.inputs) > 3 and node.inputs[3] is not None else list(range(len(starts or ())))
    steps = integers(node, 4) if len(node.inputs) > 4 else None
    if axes is None:
        observe(found, node)
        return
    cut = [axis % rank(x) for axis in axes]
    join_through(found, node, x, y, but=cut)
    for place, axis in enumerate(cut):
        whole, part = found.axis(x, axis), found.axis(y, axis)
        width, step = found.graph.nodes[whole]["width"], 1 if steps is None else steps[place]
        if starts is None or ends is None or width is None or step != 1:
            for touched, side in ((whole, "observed"), (part, "made")):
                found.pin(touched, node.name or "", SINGLE_ENTRIES(), side)  # type: ignore[arg-type]
            continue
        begin, end, _ = slice(starts[place], ends[place]).indices(width)
        if (begin, end) == (0, width):
            found.join(whole, part, node)
        else:
            pieces = [begin, part, width - end]
            _sum(found, node, whole, [piece for piece in pieces if piece != 0])


def concat(found: BasisGraph, node: ir.Node) -> None:
    """``Concat``: along the other axes, rows are put behind rows; the axis itself is made of parts and observed."""
    inputs, y = [value for value in node.inputs if value is not None], node.outputs[0]
    if not ranked(y, *inputs):
        observe(found, node)
        return
    axis = node.attributes.get_int("axis", 0) % rank(y)
    for x in inputs:
        join_through(found, node, x, y, but=[axis])
        found.pin(found.axis(x, axis), node.name or "", BESIDE(), "observed")
    found.pin(found.axis(y, axis), node.name or "", MADE_OF_PARTS(), "made")
