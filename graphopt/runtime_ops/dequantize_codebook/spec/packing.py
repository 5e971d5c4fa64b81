"""How codes of codebooks lie in bytes: bit by bit, 16 codes side by side.

Sixteen codes of ``bits`` bits become ``bits`` words of 16 bits, lowest bit first: bit i of a word is that of code i,
and bytes have the lower half of a word first. So codes of any width take no bit more than that, and a kernel takes them
apart with as many operations on 16 lanes as a code has bits.

Codes of a matrix [K, N] lie in blocks of d rows and 16 columns, the last ones padded with code 0: uint8 [T, B, 2 bits],
T = ceil(N / 16), B = ceil(K / d). The 16 codes of a block are those of its columns where an entry is d rows of one
column, and those of its rows, from left to right and then down, where it is d columns of one row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LANES = 16
"""Codes that lie side by side, and columns of a tile."""

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.uint32]


def slice_bits(codes: Codes, bits: int) -> Bytes:
    """Return codes [..., 16] as uint8 [..., 2 bits].

    Raises:
        ValueError: a code does not fit.
    """
    if codes.size and int(codes.max()) >> bits:
        raise ValueError(f"code {int(codes.max())} does not fit {bits} bits")
    digits = (codes[..., None, :] >> np.arange(bits, dtype=np.uint32)[:, None]) & np.uint32(1)
    return np.packbits(digits.astype(np.uint8), axis=-1, bitorder="little").reshape(*codes.shape[:-1], 2 * bits)


def join_bits(words: Bytes) -> Codes:
    """Return what :func:`slice_bits` was given, uint32 [..., 16]."""
    bits = words.shape[-1] // 2
    digits = np.unpackbits(words.reshape(*words.shape[:-1], bits, 2), axis=-1, bitorder="little").astype(np.uint32)
    codes: Codes = (digits << np.arange(bits, dtype=np.uint32)[:, None]).sum(-2, dtype=np.uint32)
    return codes


def to_blocks(codes: Codes, size: int, axis: int, bits: int) -> Bytes:
    """Return codes in the layout of a matrix.

    Args:
        codes: uint32 [ceil(K / size), N] where ``axis`` is 0, else [K, ceil(N / size)].
        size: numbers of an entry.
        axis: that an entry lies along: 0 for rows of one column, 1 for columns of one row.
        bits: of a code.
    """
    rows, columns = codes.shape
    if axis == 0:
        tiles = -(-columns // LANES)
        whole = np.pad(codes, ((0, 0), (0, tiles * LANES - columns)))
        return slice_bits(whole.reshape(rows, tiles, LANES).transpose(1, 0, 2), bits)
    wide = LANES // size
    tiles, blocks = -(-columns // wide), -(-rows // size)
    whole = np.pad(codes, ((0, blocks * size - rows), (0, tiles * wide - columns)))
    # b, row, t, entry -> t, b, row, entry
    return slice_bits(
        whole.reshape(blocks, size, tiles, wide).transpose(2, 0, 1, 3).reshape(tiles, blocks, LANES), bits
    )


def to_matrix(values: npt.NDArray[Any], axis: int, rows: int, columns: int) -> npt.NDArray[Any]:
    """Return the matrix [rows, columns] of what the codes of all blocks mean, [T, B, 16, d]."""
    tiles, blocks, _, size = values.shape
    of_block = values.transpose(0, 1, 3, 2) if axis == 0 else values.reshape(tiles, blocks, size, LANES)
    whole = of_block.transpose(1, 2, 0, 3).reshape(blocks * size, tiles * LANES)
    return whole[:rows, :columns]
