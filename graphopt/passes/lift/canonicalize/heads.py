"""Heads taken apart: [batch, length, heads x size] and [batch, heads, length, size]."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.graph.editing import Inserter


def split_heads(insert: Inserter, rows: ir.Value, heads: int, size: int, suffix: str) -> ir.Value:
    """Return rows [batch, length, heads x size] as [batch, length, heads, size]."""
    assert rows.shape is not None
    target = insert.integers([0, 0, heads, size])
    return insert.op("Reshape", [rows, target], [*rows.shape[:2], heads, size], rows.dtype, suffix)


def swap_axes(insert: Inserter, value: ir.Value, suffix: str) -> ir.Value:
    """Return [batch, a, b, size] as [batch, b, a, size]."""
    assert value.shape is not None
    batch, first, second, size = value.shape
    return insert.op("Transpose", [value], [batch, second, first, size], value.dtype, suffix, perm=[0, 2, 1, 3])


def join_heads(insert: Inserter, value: ir.Value, suffix: str) -> ir.Value:
    """Return [batch, heads, length, size] as [batch, length, heads x size]; heads and size are numbers."""
    assert value.shape is not None
    batch, heads, length, size = value.shape
    width = int(str(heads)) * int(str(size))
    rows = swap_axes(insert, value, f"{suffix}.turned")
    return insert.op(
        "Reshape", [rows, insert.integers([0, 0, width])], [batch, length, width], value.dtype, f"{suffix}.rows"
    )
