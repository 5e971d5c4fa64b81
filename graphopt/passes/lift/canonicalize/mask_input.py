"""The one mask that ``Attention`` takes: hidden keys and added scores together, with an explicit query axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.ports import token_port
from graphopt.graph.editing import Inserter, shared_constant

if TYPE_CHECKING:
    from collections.abc import Sequence


def one_mask(insert: Inserter, masks: Sequence[tuple[ir.Value, bool]]) -> ir.Value | None:
    """Return one mask for several, boolean where all are, or ``None`` for none.

    Args:
        insert: where to compute it.
        masks: floats that are added to scores, or booleans, with whether ``True`` means hidden.
    """
    boolean: ir.Value | None = None
    bias: ir.Value | None = None
    for number, (mask, hidden) in enumerate(masks):
        if mask.dtype is not None and mask.dtype != ir.DataType.BOOL:
            bias = (
                mask if bias is None else insert.op("Add", [bias, mask], _wide(bias, mask), mask.dtype, f"mask{number}")
            )
            continue
        visible = (
            insert.op("Not", [mask], list(mask.shape or [None] * 4), mask.dtype, f"not{number}") if hidden else mask
        )
        boolean = (
            visible
            if boolean is None
            else insert.op("And", [boolean, visible], _wide(boolean, visible), visible.dtype, f"and{number}")
        )
    if boolean is None or bias is None:
        return bias if boolean is None else boolean
    dtype = bias.dtype or ir.DataType.FLOAT
    lowest = shared_constant(insert.graph, f"lowest.{dtype.name}", np.array(dtype.min, dtype.numpy()))
    return insert.op("Where", [boolean, bias, lowest], _wide(boolean, bias), bias.dtype, "mask")


def with_queries(insert: Inserter, mask: ir.Value, query: ir.Value) -> ir.Value:
    """Return ``mask`` with an explicit query axis: onnxruntime's Attention does not broadcast it."""
    dims: list[int | str | ir.SymbolicDim | None] = [None] * 4 if mask.shape is None else list(mask.shape)
    if len(dims) < 2 or dims[-2] not in (1, None):
        return mask
    source, axis = query, 2
    for tokens in insert.graph.inputs:
        is_length = tokens.shape is not None and query.shape is not None and list(tokens.shape)[1:2] == [query.shape[2]]
        if tokens is token_port(insert.graph) and is_length:
            # So that what the mask means can be found out without running what makes the queries.
            source, axis = tokens, 1
    length = insert.op("Shape", [source], [1], ir.DataType.INT64, "length", start=axis, end=axis + 1)
    shape = [insert.integers([1] * (len(dims) - 2)), length, insert.integers([1])]
    target = insert.op("Concat", shape[len(dims) == 2 :], [len(dims)], ir.DataType.INT64, "mask_shape", axis=0)
    dims[-2] = None if query.shape is None else query.shape[2]
    return insert.op("Expand", [mask, target], dims, mask.dtype, "mask_of_queries")


def _wide(mask: ir.Value, other_mask: ir.Value) -> list[int | str | ir.SymbolicDim | None]:
    """Return the broadcast shape of two masks, as far as it is known."""
    if mask.shape is None or other_mask.shape is None or len(mask.shape) != len(other_mask.shape):
        return [None] * 4
    return [a if b == 1 else b if a in (1, b) else None for a, b in zip(mask.shape, other_mask.shape, strict=True)]
