"""Products, lookups and sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.analysis.bases.pins import CODES, CONSTANT_LEFT, PAIRED, PICKED, ROUNDED, STACKED
from graphopt.analysis.bases.rules.common import integers, join_through, observe, pin_all, rank, ranked
from graphopt.graph.weights import weight_of

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.analysis.bases.axes import BasisGraph
    from graphopt.graph.diagnostics import Fact


def matmul(found: BasisGraph, node: ir.Node) -> None:
    """``x W``: (x Q)(Q^T W) = x W, and x (W Q) = (x W) Q; W's rows read, its columns write.

    ``a b`` of two activations: (a Q)(Q^T b) = a b, so the axes that are contracted share a basis; a's rows and b's
    columns pass on.
    """
    a, b, y = node.inputs[0], node.inputs[1], node.outputs[0]
    if a is None or b is None or not ranked(a, b, y) or rank(a) < 2 or rank(b) < 2 or weight_of(node, 0):
        pin_all(found, node, CONSTANT_LEFT())
        return
    if weight_of(node, 1) is not None:
        if rank(b) != 2:
            pin_all(found, node, STACKED())
            return
        found.read(found.axis(a, -1), node, 1, 0)
        found.write(found.axis(y, -1), node, 1, 1)
        join_through(found, node, a, y, but=[rank(y) - 1])
        return
    found.join(found.axis(a, -1), found.axis(b, -2), node)
    found.mark(found.axis(a, -1), "query_key")
    found.join(found.axis(a, -2), found.axis(y, -2), node)
    found.join(found.axis(b, -1), found.axis(y, -1), node)
    found.mark(found.axis(b, -1), "value")
    reason = PAIRED()
    for value, side in ((a, "observed"), (b, "observed"), (y, "made")):
        for axis in found.axes(value)[:-2]:
            found.pin(axis, node.name or "", reason, side)  # type: ignore[arg-type]


def dequantize(found: BasisGraph, node: ir.Node) -> None:
    """Codes have been chosen for these coordinates: a rotation comes before the rounding, or not at all."""
    for axis in found.axes(node.outputs[0]):
        found.pin(axis, node.name or "", CODES(), "observed")


def round_activations(found: BasisGraph, node: ir.Node) -> None:
    """``round(x)``, number by number in these coordinates: the last axis stays, other axes pass on."""
    _pin_last(found, node, ROUNDED())


def packed(found: BasisGraph, node: ir.Node) -> None:
    """``x W`` with W as codes, chosen for these coordinates of x and of the product: both stay, other axes pass on."""
    _pin_last(found, node, CODES())


def _pin_last(found: BasisGraph, node: ir.Node, reason: Fact) -> None:
    """Pin the last axes of input and output; other axes pass on."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or not ranked(x, y):
        observe(found, node)
        return
    found.pin(found.axis(x, -1), node.name or "", reason, "observed")
    found.pin(found.axis(y, -1), node.name or "", reason, "made")
    join_through(found, node, x, y, but=[rank(y) - 1])


def gather(found: BasisGraph, node: ir.Node) -> None:
    """``table[ids]``: (table Q)[ids] = table[ids] Q; the columns of a constant table write, activations pass on."""
    data, ids, y = node.inputs[0], node.inputs[1], node.outputs[0]
    if y.dtype is not None and not y.dtype.is_floating_point():
        return
    if data is None or ids is None or not ranked(data, ids, y):
        observe(found, node)
        return
    axis = node.attributes.get_int("axis", 0) % rank(data)
    if weight_of(node, 0) is not None:
        if rank(data) == 2 and axis == 0:
            found.write(found.axis(y, -1), node, 0, 1)
        else:
            observe(found, node)
        return
    grown = rank(ids) - 1
    for index in range(rank(data)):
        if index != axis:
            found.join(found.axis(data, index), found.axis(y, index + (grown if index > axis else 0)), node)
    _pick(found, node, data, range(axis, axis + 1), y, range(axis, axis + rank(ids)))


def gather_rows(found: BasisGraph, node: ir.Node) -> None:
    """``GatherND`` along leading axes: rows are picked, what lies in a row passes on."""
    data, ids, y = node.inputs[0], node.inputs[1], node.outputs[0]
    if y.dtype is not None and not y.dtype.is_floating_point():
        return
    depth = ids.shape[-1] if ids is not None and ids.shape is not None and len(ids.shape) else None
    batch = node.attributes.get_int("batch_dims", 0)
    if data is None or ids is None or not ranked(data, y) or not isinstance(depth, int) or batch:
        observe(found, node)
        return
    left = rank(data) - depth
    for index in range(-left, 0):
        found.join(found.axis(data, index), found.axis(y, index), node)
    _pick(found, node, data, range(depth), y, range(rank(y) - left))


def reduce(found: BasisGraph, node: ir.Node) -> None:
    """A sum or mean along other axes: sum(x Q) = sum(x) Q."""
    x, y = node.inputs[0], node.outputs[0]
    axes = integers(node, 1)
    if x is None or not axes or not ranked(x, y):
        observe(found, node)
        return
    gone = {axis % rank(x) for axis in axes}
    kept = [index for index in range(rank(x)) if index not in gone]
    targets = kept if node.attributes.get_int("keepdims", 1) else range(len(kept))
    for index, target in zip(kept, targets, strict=True):
        found.join(found.axis(x, index), found.axis(y, target), node)
    _pick(found, node, x, gone, y, [index for index in range(rank(y)) if index not in targets])


def _pick(found: BasisGraph, node: ir.Node, x: ir.Value, taken: object, y: ir.Value, made: object) -> None:
    reason = PICKED(op=node.op_type)
    for value, indices, side in ((x, taken, "observed"), (y, made, "made")):
        for index in indices:  # type: ignore[attr-defined]
            found.pin(found.axis(value, index), node.name or "", reason, side)  # type: ignore[arg-type]
