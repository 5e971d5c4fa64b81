"""Blocks in the body of ``PagedAttention``: the layout of ``layout.py``, as nodes.

Shapes: B requests, T new tokens, C blocks of each request, P tokens of a block, H KV heads, D channels, W numbers or
bytes of a token and head. Constants are written as Python numbers.
"""

# onnxscript's builder makes operators by name, so its values have no static type.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime_ops.kv_attention.spec.attributes import LANES
from graphopt.runtime_ops.kv_attention.spec.body_storage import rounded_tokens
from graphopt.runtime_ops.paged_attention.spec.layout import STORAGES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onnxscript import OpBuilder


def append_latents(
    op: OpBuilder, pools: Sequence[ir.Value], tokens: ir.Value, block: ir.Value, slot: ir.Value
) -> list[ir.Value]:
    """Return keys and values [N, P, H, D / 2] with new latents [T, H, D], each in the half that its slot is in."""
    half = op.Div(op.Shape(pools[0], start=1, end=2), 2)
    of_half = op.Div(slot, half)
    after = []
    for number, pool in enumerate(pools):
        indices = op.Squeeze(op.NonZero(op.Equal(of_half, number)), [0])
        new, its_block, its_slot = (op.Gather(tensor, indices) for tensor in (tokens, block, slot))
        its_slot = op.Mod(its_slot, half)
        after.append(_scatter(op, pool, new, its_block, its_slot, are_keys=True, is_latent=True))
    return after


def latents_of(op: OpBuilder, pools: Sequence[ir.Value], table: ir.Value) -> ir.Value:
    """Return what the blocks of each request hold, float [B, H, C P, D], of keys and values; ``table`` is [B, C]."""
    heads, size = op.Shape(pools[0], start=2, end=3), op.Mul(op.Shape(pools[0], start=3, end=4), 2)
    halves = []
    for pool in pools:
        blocks = op.Cast(op.Gather(pool, table), to=ir.DataType.FLOAT)
        blocks = op.Reshape(blocks, op.Concat([0, 0], heads, [-1], axis=0))
        lines = op.Reshape(blocks, op.Concat([0, 0, 0, -1], size, [LANES], axis=0))
        lines = op.Transpose(lines, perm=[0, 2, 1, 3, 5, 4])
        halves.append(op.Reshape(lines, op.Concat([0, 0, 0, -1], size, axis=0)))
    return op.Reshape(op.Concat(*halves, axis=3), op.Concat([0, 0, -1], size, axis=0))


def append_tokens(
    op: OpBuilder,
    storage: str,
    pool: ir.Value,
    scales: ir.Value,
    tokens: ir.Value,
    destination: tuple[ir.Value, ir.Value],
    *,
    are_keys: bool = False,
    feedback: ir.Value | None = None,
) -> tuple[ir.Value, ir.Value]:
    """Return a pool and its scales with new tokens.

    Args:
        op: makes nodes.
        storage: of integers; "" for floats.
        pool: [N, P, H, W].
        scales: [N, P, H], or [0].
        tokens: float [T, H, D].
        destination: where each token goes: the block, and the slot in it, int64 [T] each.
        are_keys: whether these are keys, and not values.
        feedback: float16 [H, D, D], of keys; ``None`` for none.
    """
    block, slot = destination
    after, numbers = op.Identity(scales), tokens
    if storage:
        codes, steps = rounded_tokens(op, tokens, _levels(storage), feedback)
        after = _scatter_scales(op, scales, steps, pool, block, slot)
        numbers = _bytes_of(op, codes, storage, are_keys=are_keys)
    return _scatter(op, pool, numbers, block, slot, are_keys=are_keys), after


def append_with_residuals(
    op: OpBuilder,
    storage: str,
    pool_and_scales: tuple[ir.Value, ir.Value],
    tokens: ir.Value,
    destination: tuple[ir.Value, ir.Value],
    lasting: tuple[ir.Value, ir.Value],
    *,
    are_keys: bool = False,
    feedback: ir.Value | None = None,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return a pool and its scales with new tokens and their residuals, and what these add, float [T, H, D].

    Args:
        op: makes nodes.
        storage: of integers.
        pool_and_scales: a pool [N, P, H, W] and its scales [N, P, H].
        tokens: float [T, H, D].
        destination: where each token goes: the block, and the slot in it, int64 [T] each.
        lasting: which tokens have a residual in their block after the call, and in which slot, int64 [n] each.
        are_keys: whether these are keys, and not values.
        feedback: float16 [H, D, D], of keys; ``None`` for none.
    """
    pool, scales = pool_and_scales
    (block, slot), (indices, residual_slots), levels = destination, lasting, _levels(storage)
    codes, steps = rounded_tokens(op, tokens, levels, feedback)
    remainder = op.Sub(tokens, op.Mul(steps, op.Sub(op.Cast(codes, to=ir.DataType.FLOAT), levels / 2)))
    second_codes, second_steps = rounded_tokens(op, remainder, levels)
    residuals = op.Mul(second_steps, op.Sub(op.Cast(second_codes, to=ir.DataType.FLOAT), levels / 2))
    block, slot = op.Concat(block, op.Gather(block, indices), axis=0), op.Concat(slot, residual_slots, axis=0)
    codes = op.Concat(codes, op.Gather(second_codes, indices), axis=0)
    steps = op.Concat(steps, op.Gather(second_steps, indices), axis=0)
    after = _scatter_scales(op, scales, steps, pool, block, slot)
    numbers = _bytes_of(op, codes, storage, are_keys=are_keys)
    return _scatter(op, pool, numbers, block, slot, are_keys=are_keys), after, residuals


def _scatter_scales(
    op: OpBuilder, scales: ir.Value, steps: ir.Value, pool: ir.Value, block: ir.Value, slot: ir.Value
) -> ir.Value:
    """Return scales [N, P, H] with those of tokens, [T, H, 1]."""
    page, heads = (op.Shape(pool, start=axis, end=axis + 1) for axis in (1, 2))
    # T, H, 1 as places of [P, H]
    head = op.Reshape(_range(op, heads), [1, -1, 1])
    offset = op.Add(op.Mul(head, page), op.Reshape(slot, [-1, 1, 1]))
    indices = _indices(op, op.Reshape(block, [-1, 1, 1]), offset, (heads,))
    return op.ScatterND(scales, indices, steps)


def residual_places(op: OpBuilder, slots: ir.Value, page: ir.Value) -> ir.Value:
    """Return where the residuals of tokens in these slots lie, int64, the same shape; P for the last token."""
    distance = op.Sub(op.Sub(page, 1), slots)
    # the largest odd divisor
    odd = op.Div(distance, op.Max(op.BitwiseAnd(distance, op.Neg(distance)), 1))
    return op.Where(op.Greater(distance, 0), op.Sub(page, op.Div(op.Add(odd, 1), 2)), page)


def residuals_of(
    op: OpBuilder,
    storage: str,
    pool: ir.Value,
    scales: ir.Value,
    block: ir.Value,
    token_counts: ir.Value,
    *,
    are_keys: bool = False,
) -> ir.Value:
    """Return what residuals add to the tokens of blocks that are filled further, float [B, H, P, D]; 0 for others.

    Args:
        op: makes nodes.
        storage: of integers.
        pool: [N, P, H, W].
        scales: [N, P, H].
        block: of each request, int64 [B].
        token_counts: tokens that it has, int64 [B].
        are_keys: whether these are keys, and not values.
    """
    page = op.Shape(pool, start=1, end=2)
    numbers = pages_of(op, storage, pool, scales, op.Unsqueeze(block, [1]), are_keys=are_keys)
    slots = _range(op, page)
    slots_of_residuals = op.Min(residual_places(op, slots, page), op.Sub(page, 1))
    residuals = op.Gather(numbers, slots_of_residuals, axis=2)
    counts = op.Unsqueeze(token_counts, [1])
    first = op.Sub(op.Mul(op.Add(counts, 1), 2), page)
    is_kept = op.And(op.GreaterOrEqual(slots, first), op.Less(slots, counts))
    return op.Where(op.Unsqueeze(is_kept, [1, 3]), residuals, 0.0)


def _scatter(
    op: OpBuilder,
    pool: ir.Value,
    numbers: ir.Value,
    block: ir.Value,
    slot: ir.Value,
    *,
    are_keys: bool,
    is_latent: bool = False,
) -> ir.Value:
    """Return a pool [N, P, H, W] with numbers [T, H, W], or of latents [T, H, 2 W] for half as many tokens."""
    page, heads, wide = (op.Shape(pool, start=axis, end=axis + 1) for axis in (1, 2, 3))
    size = op.Mul(wide, 2) if is_latent else wide
    head = op.Reshape(_range(op, heads), [1, -1, 1])
    slot, block = op.Reshape(slot, [-1, 1, 1]), op.Reshape(block, [-1, 1, 1])
    # T, H, size as places of [P, H, W]
    number = op.Reshape(_range(op, size), [1, 1, -1])
    if are_keys:
        line = op.Add(op.Mul(op.Div(slot, LANES), size), number)
        inside = op.Add(op.Mul(line, LANES), op.Mod(slot, LANES))
    else:
        inside = op.Add(op.Mul(slot, size), number)
    offset = op.Add(op.Mul(head, op.Mul(page, wide)), inside)
    return op.ScatterND(pool, _indices(op, block, offset, (heads, wide)), op.CastLike(numbers, pool))


def pages_of(
    op: OpBuilder, storage: str, pool: ir.Value, scales: ir.Value, table: ir.Value, *, are_keys: bool = False
) -> ir.Value:
    """Return what the blocks of each request hold, float [B, H, C P, D]; ``table`` is int64 [B, C]."""
    heads, wide = op.Shape(pool, start=2, end=3), op.Shape(pool, start=3, end=4)
    blocks = op.Gather(pool, table)
    if not storage:
        blocks = op.Cast(blocks, to=ir.DataType.FLOAT)
    blocks = op.Reshape(blocks, op.Concat([0, 0], heads, [-1], axis=0))
    if are_keys:
        lines = op.Reshape(blocks, op.Concat([0, 0, 0, -1], wide, [LANES], axis=0))
        transposed = op.Transpose(lines, perm=[0, 2, 1, 3, 5, 4])
    else:
        transposed = op.Transpose(op.Reshape(blocks, op.Concat([0, 0, 0, -1], wide, axis=0)), perm=[0, 2, 1, 3, 4])
    rows = op.Reshape(transposed, op.Concat([0, 0, -1], wide, axis=0))
    if not storage:
        return rows
    levels = _levels(storage)
    codes = op.Cast(_codes_of(op, rows, storage, are_keys=are_keys), to=ir.DataType.FLOAT)
    steps = op.Transpose(
        op.Reshape(op.Gather(scales, table), op.Concat([0, 0], heads, [-1], axis=0)), perm=[0, 2, 1, 3]
    )
    return op.Mul(op.Sub(codes, levels / 2), op.Reshape(steps, op.Concat([0], heads, [-1, 1], axis=0)))


def _levels(storage: str) -> int:
    levels = STORAGES[storage].levels
    assert levels is not None, "bodies of floats have no codes"
    return levels


def _indices(op: OpBuilder, block: ir.Value, offset: ir.Value, dims: tuple[ir.Value, ...]) -> ir.Value:
    """Return places in a block as indices of a pool: along P, then along ``dims``."""
    digits = []
    for size in reversed(dims):
        digits.append(op.Mod(offset, size))
        offset = op.Div(offset, size)
    codeses = [op.Add(block, op.Mul(offset, 0)), offset, *reversed(digits)]
    return op.Concat(*(op.Unsqueeze(index, [-1]) for index in codeses), axis=-1)


def _bytes_of(op: OpBuilder, codes: ir.Value, storage: str, *, are_keys: bool) -> ir.Value:
    """Return the bytes [T, H, W] of codes [T, H, D]."""
    if STORAGES[storage].bits == 8:
        return codes
    if STORAGES[storage].bits == 6:
        fours = op.Reshape(codes, [0, 0, -1, 4] if are_keys else [0, 0, -1, 4, LANES])
        groups = op.Split(fours, axis=3, num_outputs=4, _outputs=4)
        low = [op.BitwiseAnd(group, 15) for group in groups]
        lines = [op.BitwiseOr(low[i], op.BitShift(low[i + 1], 4, direction="LEFT")) for i in (0, 2)]
        upper = op.BitShift(groups[0], 4, direction="RIGHT")
        for index, group in enumerate(groups[1:], 1):
            bits = op.BitShift(op.BitShift(group, 4, direction="RIGHT"), 2 * index, direction="LEFT")
            upper = op.BitwiseOr(upper, bits)
        return op.Reshape(op.Concat(*lines, upper, axis=3), [0, 0, -1])
    pairs = op.Reshape(codes, [0, 0, -1, 2] if are_keys else [0, 0, -1, 2, LANES])
    low, high = op.Split(pairs, axis=3, num_outputs=2, _outputs=2)
    both = op.BitwiseOr(low, op.BitShift(high, 4, direction="LEFT"))
    return op.Reshape(both, [0, 0, -1])


def _codes_of(op: OpBuilder, rows: ir.Value, storage: str, *, are_keys: bool) -> ir.Value:
    """Return the codes [B, H, L, D] of bytes [B, H, L, W]."""
    if STORAGES[storage].bits == 8:
        return rows
    if STORAGES[storage].bits == 6:
        units = op.Reshape(rows, [0, 0, 0, -1, 3] if are_keys else [0, 0, 0, -1, 3, LANES])
        *lines, upper = op.Split(units, axis=4, num_outputs=3, _outputs=3)
        low = [part for line in lines for part in (op.BitwiseAnd(line, 15), op.BitShift(line, 4, direction="RIGHT"))]
        high = [
            op.BitShift(op.BitwiseAnd(op.BitShift(upper, shift, direction="RIGHT"), 3), 4, direction="LEFT")
            if shift
            else op.BitShift(op.BitwiseAnd(upper, 3), 4, direction="LEFT")
            for shift in (0, 2, 4, 6)
        ]
        codes = [op.BitwiseOr(part, bits) for part, bits in zip(low, high, strict=True)]
        return op.Reshape(op.Concat(*codes, axis=4), [0, 0, 0, -1])
    pairs = op.Unsqueeze(rows, [-1]) if are_keys else op.Reshape(rows, [0, 0, 0, -1, 1, LANES])
    low, high = op.BitwiseAnd(pairs, 15), op.BitShift(pairs, 4, direction="RIGHT")
    codes = op.Concat(low, high, axis=4)
    # 0 takes over a dimension, so [B, H, L, W, 2] and [B, H, L, D/32, 2, 16] become [B, H, L, D]
    return op.Reshape(codes, [0, 0, 0, -1])


def _range(op: OpBuilder, size: ir.Value) -> ir.Value:
    """Return 0 .. size - 1 for a size int64 [1]."""
    return op.Range(0, op.Squeeze(size, [0]), 1)
