"""Products, lookups and sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.analysis.bases.pins import (
    CODES,
    CONSTANT_LEFT,
    ENTRY_BY_ENTRY,
    PICKED_ENTRIES,
    ROUNDED_INPUT,
    STACK_OF_MATRICES,
)
from graphopt.analysis.bases.rules.common import (
    has_ranks,
    integers,
    is_floating,
    join_through,
    observe,
    pin_node,
    rank,
    unary,
)
from graphopt.graph.weights import weight_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import onnx_ir as ir

    from graphopt.analysis.bases.axes import BasisGraph
    from graphopt.graph.diagnostics import Fact


def matmul(bases: BasisGraph, node: ir.Node) -> None:
    """``x W``: (x Q)(Q^T W) = x W, and x (W Q) = (x W) Q; W's rows read, its columns write.

    ``a b`` of two activations: (a Q)(Q^T b) = a b, so the axes that are contracted share a basis; a's rows and b's
    columns pass on.
    """
    a, b, y = node.inputs[0], node.inputs[1], node.outputs[0]
    if a is None or b is None or not has_ranks(a, b, y) or rank(a) < 2 or rank(b) < 2 or weight_of(node, 0):
        pin_node(bases, node, CONSTANT_LEFT())
    elif weight_of(node, 1) is None:
        _contract(bases, node, a, b, y)
    elif rank(b) != 2:
        pin_node(bases, node, STACK_OF_MATRICES())
    else:
        bases.add_reader(bases.axis(a, -1), node, 1, 0)
        bases.add_writer(bases.axis(y, -1), node, 1, 1)
        join_through(bases, node, a, y, but=[rank(y) - 1])


def _contract(bases: BasisGraph, node: ir.Node, a: ir.Value, b: ir.Value, y: ir.Value) -> None:
    bases.join(bases.axis(a, -1), bases.axis(b, -2), node)
    bases.mark(bases.axis(a, -1), "query_key")
    bases.join(bases.axis(a, -2), bases.axis(y, -2), node)
    bases.join(bases.axis(b, -1), bases.axis(y, -1), node)
    bases.mark(bases.axis(b, -1), "value")
    bases.pin_axes(bases.axes(a)[:-2], node, ENTRY_BY_ENTRY(), "observed")
    bases.pin_axes(bases.axes(b)[:-2], node, ENTRY_BY_ENTRY(), "observed")
    bases.pin_axes(bases.axes(y)[:-2], node, ENTRY_BY_ENTRY(), "made")


def dequantize(bases: BasisGraph, node: ir.Node) -> None:
    """Codes have been chosen for these coordinates: a rotation comes before the rounding, or not at all."""
    bases.pin_axes(bases.axes(node.outputs[0]), node, CODES(), "observed")


@unary
def round_activations(bases: BasisGraph, node: ir.Node, x: ir.Value, y: ir.Value) -> None:
    """``round(x)``, number by number in these coordinates: the last axis stays, other axes pass on."""
    _pin_last(bases, node, x, y, ROUNDED_INPUT())


@unary
def multiply_by_codes(bases: BasisGraph, node: ir.Node, x: ir.Value, y: ir.Value) -> None:
    """``x W`` with W as codes, chosen for these coordinates of x and of the product: both stay, other axes pass on.

    Of experts, rows of x may be shared by slots, which are an axis that y has beside them.
    """
    if rank(x) < rank(y):
        bases.pin(bases.axis(x, -1), node, CODES(), "observed")
        bases.pin(bases.axis(y, -1), node, CODES(), "made")
        for before, after in zip(bases.axes(x)[:-1], bases.axes(y), strict=False):
            bases.join(before, after, node)
        return
    _pin_last(bases, node, x, y, CODES())


def _pin_last(bases: BasisGraph, node: ir.Node, x: ir.Value, y: ir.Value, reason: Fact) -> None:
    """Pin the last axes of input and output; other axes pass on."""
    bases.pin(bases.axis(x, -1), node, reason, "observed")
    bases.pin(bases.axis(y, -1), node, reason, "made")
    join_through(bases, node, x, y, but=[rank(y) - 1])


def gather(bases: BasisGraph, node: ir.Node) -> None:
    """``table[ids]``: (table Q)[ids] = table[ids] Q; the columns of a constant table write, activations pass on."""
    table, ids, y = node.inputs[0], node.inputs[1], node.outputs[0]
    if not is_floating(y):
        return
    if table is None or ids is None or not has_ranks(table, ids, y):
        observe(bases, node)
        return
    axis = node.attributes.get_int("axis", 0) % rank(table)
    if weight_of(node, 0) is None:
        _pick_slices(bases, node, table, axis, rank(ids))
    elif rank(table) == 2 and axis == 0:
        bases.add_writer(bases.axis(y, -1), node, 0, 1)
    else:
        observe(bases, node)


def _pick_slices(bases: BasisGraph, node: ir.Node, x: ir.Value, axis: int, count: int) -> None:
    """Put ``count`` new axes in the place of ``axis``; the others pass on."""
    y = node.outputs[0]
    for index in range(rank(x)):
        if index != axis:
            target = index + count - 1 if index > axis else index
            bases.join(bases.axis(x, index), bases.axis(y, target), node)
    _pin_picked(bases, node, x, [axis], y, range(axis, axis + count))


def gather_rows(bases: BasisGraph, node: ir.Node) -> None:
    """``GatherND`` along leading axes: rows are picked, what lies in a row passes on."""
    table, ids, y = node.inputs[0], node.inputs[1], node.outputs[0]
    if not is_floating(y):
        return
    depth = ids.shape[-1] if ids is not None and ids.shape else None
    batch = node.attributes.get_int("batch_dims", 0)
    if table is None or not has_ranks(table, y) or not isinstance(depth, int) or batch:
        observe(bases, node)
        return
    width = rank(table) - depth
    for index in range(-width, 0):
        bases.join(bases.axis(table, index), bases.axis(y, index), node)
    _pin_picked(bases, node, table, range(depth), y, range(rank(y) - width))


@unary
def reduce(bases: BasisGraph, node: ir.Node, x: ir.Value, y: ir.Value) -> None:
    """A sum or mean along other axes: sum(x Q) = sum(x) Q."""
    axes = integers(node, 1)
    if not axes:
        observe(bases, node)
        return
    sums = {axis % rank(x) for axis in axes}
    sources = [index for index in range(rank(x)) if index not in sums]
    targets = sources if node.attributes.get_int("keepdims", 1) else range(len(sources))
    for source, target in zip(sources, targets, strict=True):
        bases.join(bases.axis(x, source), bases.axis(y, target), node)
    _pin_picked(bases, node, x, sums, y, [index for index in range(rank(y)) if index not in targets])


def _pin_picked(
    bases: BasisGraph, node: ir.Node, x: ir.Value, ins: Iterable[int], y: ir.Value, outs: Iterable[int]
) -> None:
    reason = PICKED_ENTRIES(op=node.op_type)
    bases.pin_axes([bases.axis(x, index) for index in ins], node, reason, "observed")
    bases.pin_axes([bases.axis(y, index) for index in outs], node, reason, "made")
