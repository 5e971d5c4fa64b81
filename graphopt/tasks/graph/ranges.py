"""Which integers an input may hold, as far as the nodes that read it tell.

Input --Cast, Reshape, ...--> Gather(table)      rows of the table
Input --Cast, Reshape, ...--> Equal(constant)    one of the constants
Input --Cast, Reshape, ...--> OneHot(depth)      below the depth
Input ----------------------> If, Where          0 and 1
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

# What leaves the numbers of its first input as they are.
_CARRIERS = frozenset(("Cast", "Identity", "Clip", "Abs", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"))
_CARRIERS |= {"Expand", "Slice", "Concat", "Pad", "Tile", "Split"}
_CONSTANT_BYTES = 1 << 12
_DEFAULT_LIMIT = 2


@dataclass(frozen=True)
class Range:
    """The integers of an input: below ``limit``, or one of ``choices`` where there are some."""

    limit: int | None = None
    choices: tuple[int, ...] = ()

    def intersect(self, second: Range) -> Range:
        """Return what both allow; where choices share none, those of the first."""
        limits = [limit for limit in (self.limit, second.limit) if limit is not None]
        return Range(min(limits) if limits else None, self.choices or second.choices)

    @property
    def upper_bound(self) -> int:
        """One more than the largest integer to draw; of many numbers the choices are special ones among others."""
        if self.limit is not None:
            return max(1, self.limit)
        return max((_DEFAULT_LIMIT, *(choice + 1 for choice in self.choices)))


def range_of(value: ir.Value) -> Range:
    """Return which integers ``value`` may hold by the nodes that read it, those in subgraphs too."""
    integers, waiting, values = Range(), [value], set[int]()
    while waiting:
        current = waiting.pop()
        if id(current) in values:
            continue
        values.add(id(current))
        for node, index in current.uses():
            if node.domain:
                continue
            if node.op_type in _CARRIERS and (index == 0 or node.op_type == "Concat"):
                waiting += node.outputs
            else:
                integers = integers.intersect(_range_of_use(node, index))
    return integers


def _range_of_use(node: ir.Node, index: int) -> Range:
    if node.op_type in ("Gather", "GatherElements") and index == 1:
        table = node.inputs[0]
        rows = None if table is None or table.shape is None else table.shape[node.attributes.get_int("axis", 0)]
        return Range(limit=rows if isinstance(rows, int) else None)
    if node.op_type == "OneHot" and index == 0:
        depth = _constants(node, 1)
        return Range(limit=depth[0] if depth else None)
    if node.op_type == "Equal":
        return Range(choices=_constants(node, 1 - index))
    if node.op_type in ("If", "Where") and index == 0:
        return Range(limit=2)
    return Range()


def _constants(node: ir.Node, index: int) -> tuple[int, ...]:
    """Return the integers of a small constant input; none where it is no such input."""
    value = node.inputs[index] if index < len(node.inputs) else None
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or not tensor.dtype.is_integer() or tensor.nbytes > _CONSTANT_BYTES:
        return ()
    return tuple(int(number) for number in np.asarray(tensor.numpy()).ravel())
