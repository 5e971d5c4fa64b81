"""How ``ai.graphopt::PagedAttention`` stores a block of P tokens of H KV heads with D channels.

A block holds its heads one behind the other, whatever the shape of the tensor [N, P, H, W] says: P W numbers of head 0,
then those of head 1. Within a head it is as a page of ``KVAttention``: keys [P/16, W, 16], so that one channel of 16
tokens is one load, and values [P, W]. Scales [N, P, H] lie the same: P of head 0, then P of head 1.

Floats: W = D, no scales.

Integers: each token of each head is rounded by itself, with a scale of its own for its key and one for its value: codes
from 0 to L, L = 255, 63 or 15, and a code c stands for scale (c - L / 2). So a block is complete with every token, and
no token changes the bytes of another one.

int8: W = D. int4: W = D / 2. A byte of a key has channel 2 i in its low 4 bits and channel 2 i + 1 in the high ones. A
byte of a value has channel 32 g + i, i < 16, and channel 32 g + 16 + i: it is byte 16 g + i. So D is a multiple of 32.

int6: W = 3 D / 4. Three lines of 16 bytes hold 64 codes, four times 16: one the low 4 bits of the first 16 and, in the
high bits, of the second, one those of the third and the fourth, and one the upper 2 bits of all, those of the first
lowest. 16 codes are a channel of 16 tokens of keys, or 16 channels of a value. So D is a multiple of 64.

Residuals: a block of integers that is not full keeps second codes of its newest tokens, of what their first codes
leave, in slots that have no token yet, each rounded as a token of its own. A block with n tokens has them of the tokens
from 2 n - P on: of all as long as half of the block is empty, then of as many as there are free slots. That of token j
lies in the slot P - (o + 1) / 2, where o is the largest odd divisor of P - 1 - j: with token n goes the residual that
lay in slot n, and the next older one, whose slot the residual of token n takes. The last token of a block has none. So
a full block has first codes alone, whatever calls it was filled by.

Latents, of which values are a part, are stored once, as floats, in blocks of 32 tokens or more: the first half of a
block's tokens lies in `keys` and the second half in `values`, each as keys of P / 2 tokens and D channels: W = D / 2.

This layout is part of the operator's meaning.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.kv_attention.spec.attributes import LANES, MOST_CHANNELS, MOST_LATENT, MOST_OF_FLOATS
from graphopt.runtime_ops.kv_attention.spec.layout import round_tokens, to_storage
from graphopt.runtime_ops.kv_attention.spec.storages import STORAGE_OF

Array = npt.NDArray[Any]

STORAGES = {name: STORAGE_OF[name] for name in ("float32", "float16", "bfloat16", "int8", "int6", "int4")}
"""What blocks may hold, by the name that the attribute ``storage`` calls it."""


def width(head_size: int, storage: str) -> int:
    """Return W, the numbers or bytes of a token and head.

    Raises:
        ValueError: heads of this size cannot be stored so.
    """
    if storage not in STORAGES:
        raise ValueError(f"blocks are stored as {', '.join(STORAGES)}, not {storage}")
    elements, limit = STORAGES[storage].elements(head_size), most_channels(storage)
    if head_size % _multiple(storage) or not 0 < head_size <= limit or elements < LANES:
        raise ValueError(
            f"a head of {storage} has a multiple of {_multiple(storage)} channels up to {limit}, not {head_size}"
        )
    return elements


def most_channels(storage: str) -> int:
    """Return the largest D of blocks without latents."""
    return MOST_OF_FLOATS if STORAGES[storage].levels is None else MOST_CHANNELS


def latent_width(size: int, storage: str, tokens: int) -> int:
    """Return W of blocks of so many tokens whose heads are latents of ``size`` channels.

    Raises:
        ValueError: latents cannot be stored so.
    """
    if storage not in STORAGES or STORAGES[storage].levels is not None:
        floats = [name for name, kind in STORAGES.items() if kind.levels is None]
        raise ValueError(f"blocks of latents are stored as {', '.join(floats)}, not {storage}")
    if size % LANES or not 0 < size <= MOST_LATENT:
        raise ValueError(f"a latent has a multiple of {LANES} channels up to {MOST_LATENT}, not {size}")
    if tokens < 2 * LANES:
        raise ValueError(f"a block of latents has {2 * LANES} tokens or more, not {tokens}")
    return size // 2


def head_size(width: int, storage: str) -> int:
    """Return D for blocks of this width."""
    return width * (8 * STORAGES[storage].dtype.itemsize) // STORAGES[storage].bits


def unpack(blocks: Array, storage: str, *, are_keys: bool) -> Array:
    """Return what blocks [N, P, H, W] hold: numbers, or codes as uint8, [N, H, P, D]."""
    count, tokens, heads, wide = blocks.shape
    of_head = blocks.reshape(count, heads, tokens * wide)
    elements = of_head.reshape(count, heads, -1, wide, LANES).swapaxes(-1, -2) if are_keys else of_head
    if STORAGES[storage].bits == 6:
        lines = np.ascontiguousarray(of_head).reshape(count, heads, -1, 3, LANES)
        codes = np.stack([lines[..., line, :] >> shift & 15 for line in (0, 1) for shift in (0, 4)], axis=-2)
        codes |= np.stack([lines[..., 2, :] >> shift & 3 for shift in (0, 2, 4, 6)], axis=-2) << np.uint8(4)
        size = head_size(wide, storage)
        if are_keys:
            codes = codes.reshape(count, heads, -1, size, LANES).swapaxes(-1, -2)
        return np.ascontiguousarray(codes).reshape(count, heads, tokens, size)
    elements = np.ascontiguousarray(elements).reshape(count, heads, tokens, wide)
    if STORAGES[storage].bits >= 8:
        return elements
    if are_keys:
        codes = np.stack([elements & 15, elements >> 4], axis=-1)
    else:
        pairs = elements.reshape(count, heads, tokens, -1, LANES)
        codes = np.stack([pairs & 15, pairs >> 4], axis=-2)
    return codes.reshape(count, heads, tokens, 2 * wide)


def pack(numbers: Array, storage: str, *, are_keys: bool) -> Array:
    """Return the blocks that hold this; the inverse of :func:`unpack`."""
    count, heads, tokens, size = numbers.shape
    elements = numbers
    if STORAGES[storage].bits == 6:
        lines = numbers.reshape(count, heads, -1, LANES, size).swapaxes(-1, -2) if are_keys else numbers
        first, second, third, fourth = np.moveaxis(lines.reshape(count, heads, -1, 4, LANES), -2, 0)
        four = np.uint8(4)
        low = [first & 15 | second << four, third & 15 | fourth << four]
        upper = (first >> four) | (second >> four) << 2 | (third >> four) << 4 | (fourth >> four) << 6
        elements = np.stack([*low, upper], axis=-2).astype(np.uint8)
        return elements.reshape(count, tokens, heads, width(size, storage))
    if STORAGES[storage].bits < 8:
        if are_keys:
            low, high = np.moveaxis(numbers.reshape(count, heads, tokens, -1, 2), -1, 0)
        else:
            low, high = np.moveaxis(numbers.reshape(count, heads, tokens, -1, 2, LANES), -2, 0)
        elements = (low | high << np.uint8(4)).reshape(count, heads, tokens, size // 2)
    wide = elements.shape[-1]
    if are_keys:
        elements = elements.reshape(count, heads, -1, LANES, wide).swapaxes(-1, -2)
    return np.ascontiguousarray(elements).reshape(count, tokens, heads, wide)


def unpack_latents(keys: Array, values: Array, storage: str) -> Array:
    """Return the latents [N, H, P, D] of blocks [N, P, H, D / 2]."""
    count, tokens, heads, wide = keys.shape
    halves = [pool.reshape(count, tokens // 2, heads, 2 * wide) for pool in (keys, values)]
    return np.concatenate([unpack(half, storage, are_keys=True) for half in halves], axis=2)


def pack_latents(numbers: Array, storage: str) -> tuple[Array, Array]:
    """Return keys and values that hold this; the inverse of :func:`unpack_latents`."""
    count, heads, tokens, size = numbers.shape
    halves = [pack(half, storage, are_keys=True) for half in np.split(numbers, 2, axis=2)]
    keys, values = (half.reshape(count, tokens, heads, size // 2) for half in halves)
    return keys, values


def store_tokens(tokens: Array, storage: str, feedback: Array | None = None) -> tuple[Array, Array | None]:
    """Return tokens [..., D] as they are stored: numbers, or codes as uint8 and their scales float32 [...].

    Args:
        tokens: floats.
        storage: of the blocks.
        feedback: float16 [Hk, D, D], of keys [T, Hk, D] that are stored as codes; ``None`` for none.
    """
    levels = STORAGES[storage].levels
    if levels is None:
        return to_storage(tokens.astype(np.float32), storage), None
    return round_tokens(tokens.astype(np.float32), levels, None if feedback is None else feedback.astype(np.float32))


def restore_tokens(held: Array, scales: Array | None, storage: str) -> npt.NDArray[np.float64]:
    """Return the numbers that stored ones stand for, float64; arguments as :func:`store_tokens` returns them."""
    levels = STORAGES[storage].levels
    numbers = held.astype(np.float64)
    if levels is None or scales is None:
        return numbers
    elements: npt.NDArray[np.float64] = scales[..., None].astype(np.float64) * (numbers - levels / 2)
    return elements


def residual_slots(tokens: int) -> npt.NDArray[np.int64]:
    """Return the slot of each token's residual in a block of so many tokens, int64 [P]; P of the last, which has none.

    Args:
        tokens: P, a power of 2.
    """
    distance = np.arange(tokens)[::-1]
    odd = distance // np.maximum(distance & -distance, 1)
    return np.where(distance > 0, tokens - (odd + 1) // 2, tokens)


def first_with_residual(count: Any, tokens: int) -> Any:
    """Return the first token whose residual a block of ``tokens`` keeps when it has ``count``; at most 0 for all."""
    return 2 * count - tokens


def _multiple(storage: str) -> int:
    return {6: 4 * LANES, 4: 2 * LANES}.get(STORAGES[storage].bits, LANES)
