"""How ``ai.graphopt::KVAttention`` stores a page of T tokens with D channels.

Floats: keys [T/16, D, 16], so that one channel of 16 tokens is one load; values [T, D], as they come. They have no
scales, float8 neither, as in other implementations of such caches when no scales are given.

Integers: keys [T/16, D/4, 16, 4], so that four channels of a token are neighbours, as a dot product of bytes takes
them; values the same with the axes changed, [D/16, T/4, 16, 4]: what is summed over, channels for keys and tokens for
values, lies in fours. int4 has two neighbouring fours in a byte, the first of them in its low 4 bits,
int2 has four of them, int1 eight. int6 and int3 are cut into planes: of each 16 codes the lower 4 bits as int4 and then
the upper 2 as int2; of each 32 the lower 2 bits as int2 and then the upper one as int1.

Keys are rounded with a scale per channel and page, values with a scale per token, after KIVI (Liu et al. 2024): a
few channels of keys are large throughout, while values have no such channels. Keys may be divided by a factor per token
before, so that the scale of a channel fits large and small keys (KVarN, arXiv 2606.03458, normalizes rows and columns).
Codes of values may have other bits than those of keys.

Lows, steps and factors are float16. A low is rounded down and a step up, so that no number lies outside of what codes
span, and codes are chosen with the rounded ones, so that numbers err by what codes err by.

This layout is part of the operator's meaning.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.kv_attention.spec.attributes import LANES
from graphopt.runtime_ops.kv_attention.spec.storages import STORAGE_OF

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Singles = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]

LARGEST_SCALE = float(np.finfo(np.float16).max)
"""Lows are from -65504 to 65504, steps from 0 to 65504."""

SQUARE_STEPS = 1 << 14
"""Of the square of the share that a key has of the largest in its channel."""

TINY = np.float32(1e-30)
"""Tokens whose numbers span less count as 0: their step could not be divided by."""


def pack_keys(page: Array, storage: str) -> Array:
    """Return keys as they are stored.

    Args:
        page: [..., T, D], floats, or codes as uint8 for a storage of integers.
        storage: one of ``STORAGES``.

    Returns:
        [..., n] in the storage's type: n = T D numbers, or T D bits / 8 bytes for codes of fewer bits than 8.
    """
    if STORAGE_OF[storage].levels is not None:
        return _pack_codes(page, storage)
    *leading, tokens, channels = page.shape
    blocks = page.reshape(*leading, tokens // LANES, LANES, channels).swapaxes(-1, -2)
    return _flat(to_storage(blocks, storage), leading)


def unpack_keys(stored_page: Array, tokens: int, channels: int, storage: str) -> Array:
    """Return what :func:`pack_keys` was given, [..., T, D]: uint8 for a storage of integers, else the stored type."""
    if STORAGE_OF[storage].levels is not None:
        return _unpack_codes(stored_page, tokens, channels, storage)
    leading = stored_page.shape[:-1]
    blocks = stored_page.reshape(*leading, tokens // LANES, channels, LANES).swapaxes(-1, -2)
    return np.ascontiguousarray(blocks).reshape(*leading, tokens, channels)


def pack_values(page: Array, storage: str) -> Array:
    """Return values as they are stored; arguments and result as of :func:`pack_keys`."""
    if STORAGE_OF[storage].levels is not None:
        return _pack_codes(page.swapaxes(-1, -2), storage)
    return _flat(to_storage(page, storage), page.shape[:-2])


def unpack_values(stored_page: Array, tokens: int, channels: int, storage: str) -> Array:
    """Return what :func:`pack_values` was given, [..., T, D]: uint8 for a storage of integers, else the stored type."""
    if STORAGE_OF[storage].levels is not None:
        return np.ascontiguousarray(_unpack_codes(stored_page, channels, tokens, storage).swapaxes(-1, -2))
    return stored_page.reshape(*stored_page.shape[:-1], tokens, channels)


def to_storage(numbers: Array, storage: str) -> Array:
    """Return numbers, of float32 or stored already, in the type of a storage of floats.

    To the nearest, ties to even. What is too large becomes infinite, but for float8: that becomes the largest number,
    infinity too, and only NaN stays NaN (``Cast`` of ONNX with ``saturate=1``).
    """
    dtype, largest = STORAGE_OF[storage].dtype, STORAGE_OF[storage].largest
    if largest is not None and numbers.dtype != dtype:
        numbers = numbers.clip(-largest, largest)
    with np.errstate(over="ignore", invalid="ignore"):
        return numbers.astype(dtype)


def scales_below(numbers: Singles) -> Halves:
    """Return the largest float16 at or below each number; -65504 below that, and NaN for NaN."""
    inside = numbers.clip(-LARGEST_SCALE, LARGEST_SCALE)
    nearest = inside.astype(np.float16)
    with np.errstate(over="ignore"):  # of numbers that are not taken
        return np.where(nearest > inside, np.nextafter(nearest, np.float16(-np.inf)), nearest)


def scales_above(numbers: Singles) -> Halves:
    """Return the least float16 at or above each number; 65504 above that, and NaN for NaN."""
    return -scales_below(-numbers)


def round_page(page: Singles, axis: int, levels: int, clip: float = 1.0) -> tuple[Bytes, Halves, Halves]:
    """Round numbers to codes, in float32 arithmetic.

    margin = (max - min) (1 - clip) / 2. low = min + margin, rounded down to float16, from -65504 to 65504. step =
    max((max - margin - low) / levels, 0), rounded up to float16, to 65504. code = round((x - low) (1 / step)), ties to
    even, from 0 to levels; 0 where step = 0. So numbers below -65504 become that, and those above low + levels 65504
    that. A set that is not finite, or where max - min is not, has low = NaN, step = 0 and codes 0.

    Args:
        page: float32, of any shape.
        axis: the numbers along it share a scale: tokens for keys, channels for values.
        levels: the largest code.
        clip: the share of what the numbers span that codes span, in (0, 1].

    Returns:
        codes uint8, the shape of ``page``; low and step, float16, without ``axis``.
    """
    low, step, inverse = _page_steps(page, axis, levels, clip)
    with np.errstate(invalid="ignore", over="ignore"):
        codes = _codes((page - low) * inverse, levels)
    return codes.astype(np.uint8), low.squeeze(axis), step.squeeze(axis)


def clip_of_rounded(clip: float) -> float:
    """Return the ``clip`` for keys that were rounded with one before, and share scales with other tokens now.

    What was cut off is not there to be cut off again; but where numbers of other pages, or of other channels by a
    rotary embedding, came to a set, it spans more than a code stands for. The root of the clip lies between; it is a
    choice that was measured on random numbers alone.
    """
    return math.sqrt(clip)


def round_with_feedback(
    keys: Singles, feedback: Singles, levels: int, clip: float = 1.0
) -> tuple[Bytes, Halves, Halves]:
    """Round keys to codes as :func:`round_page` does, channel by channel: those behind make up for each error.

    Scales are those of :func:`round_page`. Then for c from 0 to D - 1, in float32: code = round((x_c - low_c) (1 /
    step_c)) from 0 to levels, 0 for NaN; error = x_c - (low_c + step_c code), 0 where that is not finite; and x_i -=
    error feedback[c, i] for all i > c. :func:`graphopt.quantization.rounding.ldl.key_feedback` says which feedback
    changes scores least.

    Args:
        keys: float32 [Hk, ..., T, D].
        feedback: float32 [Hk, D, D], of which the numbers above the diagonal are read.
        levels: the largest code.
        clip: as for :func:`round_page`.

    Returns:
        As :func:`round_page` for the tokens' axis.
    """
    low, step, inverse = _page_steps(keys, -2, levels, clip)
    scales = (low.astype(np.float32), step.astype(np.float32), inverse)
    return _round_channels(keys, feedback, scales, levels), low.squeeze(-2), step.squeeze(-2)


def _round_channels(keys: Singles, feedback: Singles, scales: Sequence[Singles], levels: int) -> Bytes:
    """Return codes of keys [Hk, ..., D] by low, step and inverse step, see :func:`round_with_feedback`."""
    low, step, inverse = (np.broadcast_to(tensor, keys.shape) for tensor in scales)
    numbers, codes = keys.copy(), np.zeros(keys.shape, np.uint8)
    leading = (len(feedback), *(1,) * (keys.ndim - 2))
    with np.errstate(invalid="ignore", over="ignore"):
        for c in range(keys.shape[-1]):
            x = numbers[..., c]
            code = _codes((x - low[..., c]) * inverse[..., c], levels)
            codes[..., c] = code
            error = x - (low[..., c] + step[..., c] * code)
            error = np.where(np.isfinite(error), error, np.float32(0))
            numbers[..., c + 1 :] -= error[..., np.newaxis] * feedback[:, c, c + 1 :].reshape(*leading, -1)
    return codes


def factors_of_tokens(keys: Singles) -> Halves:
    """Return how large the keys of a page are, beside one another: the root of the mean square of |key| / largest.

    The largest is that of the channel in the page, and squares are rounded to multiples of 2^-14, ties to even, so that
    their sum is exact in any order. A factor is 1 for a key whose sum is 0, and for all keys of a page with a number
    that is not finite. It is rounded to the nearest float16, and is never 0, being 2^-7 / sqrt(D) or more.

    Args:
        keys: float32 [..., T, D].

    Returns:
        float16 [..., T, 1].
    """
    magnitude = np.abs(keys)
    largest = magnitude.max(-2, keepdims=True)
    is_finite = np.isfinite(largest).all(-1, keepdims=True)
    shares = np.where(is_finite, magnitude, np.float32(0)) / np.where(is_finite & (largest > 0), largest, np.float32(1))
    total = np.rint(shares * shares * np.float32(SQUARE_STEPS)).sum(-1, keepdims=True)
    factors = np.where(total > 0, np.sqrt(total / np.float32(SQUARE_STEPS * keys.shape[-1])), np.float32(1))
    return factors.astype(np.float16)


def round_tokens(tokens: Singles, levels: int, feedback: Singles | None = None) -> tuple[Bytes, Singles]:
    """Round each token to codes around zero, from -m to m with m = max |x| of the token, in float32.

    code = round((x + m) (levels / 2 m)), ties to even, from 0 to levels; 0 where 2 m < 1e-30 or a number is not finite.
    With ``feedback`` its channels are rounded one after the other, as :func:`round_with_feedback` does it.

    A code c stands for scale (c - levels / 2).

    Args:
        tokens: float32 [..., D]; with ``feedback`` [T, Hk, D].
        levels: the largest code.
        feedback: float32 [Hk, D, D].

    Returns:
        codes uint8, the shape of ``tokens``; scales float32 [...], NaN where a number is not finite.
    """
    magnitude = np.abs(tokens).max(-1, keepdims=True)
    with np.errstate(over="ignore"):
        span = magnitude + magnitude
        low, step, inverse = _steps(-magnitude, span, levels)
        if feedback is None:
            with np.errstate(invalid="ignore"):
                codes = _codes((tokens - low) * inverse, levels).astype(np.uint8)
        else:
            by_head = tuple(tensor.swapaxes(0, 1) for tensor in (low, step, inverse))
            codes = _round_channels(tokens.swapaxes(0, 1), feedback, by_head, levels).swapaxes(0, 1)
        low, step = low.squeeze(-1), step.squeeze(-1)
    return codes, np.where(np.isnan(low), low, step)


def _page_steps(page: Singles, axis: int, levels: int, clip: float) -> tuple[Halves, Halves, Singles]:
    """Return low, step and the inverse of the step of each set, with an ``axis`` of 1, see :func:`round_page`."""
    lowest, highest = page.min(axis, keepdims=True), page.max(axis, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        whole = highest - lowest
        margin = whole * np.float32((1 - clip) / 2)
        low = scales_below(np.where(np.isfinite(whole), lowest + margin, np.float32(np.nan)))
        step = scales_above(np.fmax((highest - margin - low) / np.float32(levels), np.float32(0)))
    divisor = np.where(step > 0, step, np.float16(1)).astype(np.float32)
    return low, step, np.where(step > 0, 1 / divisor, np.float32(0))


def _steps(low: Singles, span: Singles, levels: int) -> tuple[Singles, Singles, Singles]:
    """Return low, step and the inverse of the step of each set: NaN, 0 and 0 where it is not finite."""
    is_finite = np.isfinite(span)
    is_flat = ~is_finite | (span < TINY)
    divisor = np.where(is_flat, np.float32(1), span)
    step, inverse = divisor / np.float32(levels), np.float32(levels) / divisor
    zero = np.float32(0)
    low = np.where(is_finite, low, np.float32(np.nan))
    return low, np.where(is_flat, zero, step), np.where(is_flat, zero, inverse)


def _codes(steps: Singles, levels: int) -> Singles:
    """Return the nearest codes, 0 for NaN."""
    return np.clip(np.rint(np.where(np.isnan(steps), np.float32(0), steps)), 0, levels)


def _pack_codes(codes: Bytes, storage: str) -> Bytes:
    *leading, lanes, depth = codes.shape
    stored = STORAGE_OF[storage]
    shape = (*leading, lanes // LANES, depth // stored.unit)
    blocks = (
        codes.reshape(*shape[:-1], LANES, depth // 4, 4).swapaxes(-2, -3).reshape(*shape, stored.unit // 4, LANES, 4)
    )
    planes, shift = [], 0
    for bits in stored.planes:
        plane = (blocks >> np.uint8(shift) & np.uint8(2**bits - 1)).reshape(
            *shape, stored.unit // 4 * bits // 8, 8 // bits, LANES, 4
        )
        lines = plane[..., 0, :, :].copy()
        for index in range(1, 8 // bits):
            lines |= plane[..., index, :, :] << np.uint8(bits * index)
        planes.append(lines)
        shift += bits
    return _flat(np.concatenate(planes, axis=-3), leading)


def _unpack_codes(stored_page: Bytes, lanes: int, depth: int, storage: str) -> Bytes:
    leading, stored = stored_page.shape[:-1], STORAGE_OF[storage]
    shape = (*leading, lanes // LANES, depth // stored.unit)
    lines = stored_page.reshape(*shape, stored.unit * stored.bits // 32, LANES, 4)
    codes, first, shift = np.zeros((*shape, stored.unit // 4, LANES, 4), np.uint8), 0, 0
    for bits in stored.planes:
        count = stored.unit // 4 * bits // 8
        shifts = (bits * np.arange(8 // bits, dtype=np.uint8))[:, np.newaxis, np.newaxis]
        plane = lines[..., first : first + count, np.newaxis, :, :] >> shifts & np.uint8(2**bits - 1)
        codes |= plane.reshape(codes.shape) << np.uint8(shift)
        first, shift = first + count, shift + bits
    blocks = codes.reshape(*leading, lanes // LANES, depth // 4, LANES, 4).swapaxes(-2, -3)
    return np.ascontiguousarray(blocks).reshape(*leading, lanes, depth)


def _flat(blocks: Array, leading: list[int] | tuple[int, ...]) -> Array:
    return np.ascontiguousarray(blocks).reshape(*leading, math.prod(blocks.shape[len(leading) :]))
