"""How ``ai.graphopt::MatMulTable`` stores codes, scales and zero points.

Codes [K, N] are cut into tiles of 16 columns and each tile into units of 16 rows, the last ones padded with code 0. A
unit's 256 codes stand in an order that a product reads in one go: position p = 64 j + 4 r + i holds row 4 j + i and
column r of the unit, so that four rows of one column are neighbours and 64 positions hold 16 columns.

Codes of ``bits`` bits are cut into planes of 8, 4, 2 and 1 bits, so that every load is aligned (FP6-LLM, Xia et al.
2024, section 5.2, does so for 6 bits): 8 bits are one plane of 8, anything less has a plane for each binary digit of
``bits``, the widest first. The first plane holds the lowest bits of each code. A plane of w bits is lines of 64 bytes
(32 for w = 1); byte b of a line holds, from its lowest bits up, the positions b, b + 64, b + 128, ... of the line.

Codes 0, 1 and 2 of 2 bits may be digits of base 3 instead, five in a byte: a unit has 52 bytes, and digit i of byte b,
floor(byte / 3^i) mod 3, is position b + 52 i; the last 4 are padding. That is 1.625 bits for a code.

This layout is part of the operator's meaning: files hold it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TILE = 16
"""Columns of a tile; a scale is stored for each of them."""

UNIT = 16
"""Rows of a unit."""

DIGIT_BYTES = 52
"""Bytes of a unit whose codes are digits of base 3."""

WIDTHS = (8, 4, 2, 1)
"""Bits that a plane may have."""

Bytes = npt.NDArray[np.uint8]

_CODES = TILE * UNIT
_DIGITS = 5
_LINE = 64

# Codes that are packed or unpacked at a time; the temporaries take a few bytes for each.
_BLOCK = 1 << 21


def line_bytes(width: int) -> int:
    """Return the bytes of a line of a plane of ``width`` bits."""
    return 64 if width > 1 else 32


def bits_of(shape: Sequence[int]) -> int:
    """Return the bits of a code, from the shape of packed codes: a unit of 256 codes is one row of bytes."""
    return 2 if shape[-1] == DIGIT_BYTES else shape[-1] * 8 // _CODES


def pack(codes: Bytes, bits: int) -> Bytes:
    """Return codes in the layout of the operator.

    Args:
        codes: uint8 [K, N].
        bits: 1 to 8.

    Returns:
        uint8 [T, U, 32 bits] with T = ceil(N / 16) and U = ceil(K / 16).

    Raises:
        ValueError: ``bits`` is out of range, ``codes`` is no matrix of uint8, or a code does not fit.
    """
    _check_bits(bits)
    if codes.ndim != 2 or codes.dtype != np.uint8:
        raise ValueError(f"codes must be uint8 [K, N], they are {codes.dtype} {list(codes.shape)}")
    if codes.size and int(codes.max()) >> bits:
        raise ValueError(f"code {int(codes.max())} does not fit {bits} bits")
    rows, columns = codes.shape
    tiles, units = -(-columns // TILE), -(-rows // UNIT)
    planes = np.empty((tiles, units, _CODES // 8 * bits), np.uint8)
    for tile_range in _blocks(tiles, units):
        part = codes[:, tile_range.start * TILE : tile_range.stop * TILE]
        whole = np.pad(part, ((0, units * UNIT - rows), (0, len(tile_range) * TILE - part.shape[1])))
        # u, j, i, t, r -> t, u, j, r, i
        units_first = whole.reshape(units, 4, 4, len(tile_range), TILE).transpose(3, 0, 1, 4, 2)
        positions = units_first.reshape(len(tile_range), units, _CODES)
        for width, start in _planes(bits):
            line, per_byte = line_bytes(width), 8 // width
            digits = (positions >> start) & (2**width - 1)
            lines = digits.reshape(len(tile_range), units, -1, per_byte, line)
            shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
            plane = np.bitwise_or.reduce(lines << shifts, axis=-2)
            planes[tile_range.start : tile_range.stop, :, 32 * start : 32 * (start + width)] = plane.reshape(
                len(tile_range), units, 32 * width
            )
    return planes


def unpack(planes: Bytes, rows: int, columns: int) -> Bytes:
    """Return the codes [rows, columns] that :func:`pack` was given; padding is not looked at.

    Raises:
        ValueError: ``planes`` is not uint8 [ceil(columns / 16), ceil(rows / 16), 32 bits or 52].
    """
    tiles, units = -(-columns // TILE), -(-rows // UNIT)
    if planes.ndim == 3 and planes.shape[2] == DIGIT_BYTES:
        planes = unpack_digits(planes)
    if planes.dtype != np.uint8 or planes.ndim != 3 or planes.shape[:2] != (tiles, units) or planes.shape[2] % 32:
        raise ValueError(
            f"codes of a {rows} x {columns} weight are uint8 [{tiles}, {units}, 32 bits], "
            f"these are {planes.dtype} {list(planes.shape)}"
        )
    bits = bits_of(planes.shape)
    _check_bits(bits)
    codes = np.empty((rows, columns), np.uint8)
    for tile_range in _blocks(tiles, units):
        positions = np.zeros((len(tile_range), units, _CODES), np.uint8)
        for width, start in _planes(bits):
            plane = planes[tile_range.start : tile_range.stop, :, 32 * start : 32 * (start + width)]
            lines = plane.reshape(len(tile_range), units, -1, 1, line_bytes(width))
            shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
            digits = (lines >> shifts) & (2**width - 1)
            positions |= digits.reshape(positions.shape) << start
        # t, u, j, r, i -> u, j, i, t, r
        units_last = positions.reshape(len(tile_range), units, 4, TILE, 4).transpose(1, 2, 4, 0, 3)
        part = units_last.reshape(units * UNIT, len(tile_range) * TILE)
        codes[:, tile_range.start * TILE : tile_range.stop * TILE] = part[:rows, : columns - tile_range.start * TILE]
    return codes


def pack_digits(planes: Bytes) -> Bytes:
    """Return packed codes of 2 bits as digits of base 3.

    Args:
        planes: uint8 [..., 64], units of 256 codes.

    Returns:
        uint8 [..., 52].

    Raises:
        ValueError: a code is 3.
    """
    if (planes & planes >> 1 & 0x55).any():
        raise ValueError("a code is 3, which is no digit of base 3")
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    positions = (planes[..., None, :] >> shifts & 3).reshape(*planes.shape[:-1], _CODES)
    padding = [(0, 0)] * (planes.ndim - 1) + [(0, _DIGITS * DIGIT_BYTES - _CODES)]
    digits = np.pad(positions, padding).reshape(*planes.shape[:-1], _DIGITS, DIGIT_BYTES)
    digit_bytes = np.zeros((*planes.shape[:-1], DIGIT_BYTES), np.uint8)
    for number in reversed(range(_DIGITS)):
        digit_bytes = digit_bytes * np.uint8(3) + digits[..., number, :]
    return digit_bytes


def unpack_digits(digit_bytes: Bytes) -> Bytes:
    """Return what :func:`pack_digits` was given; any byte is five digits."""
    quotient, digits = digit_bytes, []
    for _ in range(_DIGITS):
        digits.append(quotient % np.uint8(3))
        quotient = quotient // np.uint8(3)
    positions = np.concatenate(digits, axis=-1)[..., :_CODES].reshape(*digit_bytes.shape[:-1], 4, _LINE)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return np.asarray(np.bitwise_or.reduce(positions << shifts, axis=-2))


def confirm_base(codes: Bytes, base: int) -> None:
    """Confirm that packed codes are digits where an attribute says so, and only there.

    Raises:
        ValueError: they are not.
    """
    if (codes.shape[-1] == DIGIT_BYTES) != (base == 3):
        raise ValueError(f"codes {list(codes.shape)} do not fit base {base}: units of digits have {DIGIT_BYTES} bytes")


def tile(per_group: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return scales or zero points [G, N] as [T, G, 16], padded with 0; the type stays."""
    groups, columns = per_group.shape
    whole = np.pad(per_group, ((0, 0), (0, -columns % TILE)))
    return np.ascontiguousarray(whole.reshape(groups, -1, TILE).transpose(1, 0, 2))


def untile(tensor: npt.NDArray[Any], columns: int) -> npt.NDArray[Any]:
    """Return what :func:`tile` was given, [G, columns]."""
    return np.ascontiguousarray(tensor.transpose(1, 0, 2).reshape(tensor.shape[1], -1)[:, :columns])


def _planes(bits: int) -> Iterator[tuple[int, int]]:
    """Yield the width of each plane and the place of its lowest bit in a code: its bytes begin at 32 times that."""
    for width in WIDTHS:
        start = bits // (2 * width) * 2 * width
        if start + width <= bits:
            yield width, start


def _blocks(tiles: int, units: int) -> Iterator[range]:
    step = max(1, _BLOCK // (_CODES * max(1, units)))
    for start in range(0, tiles, step):
        yield range(start, min(start + step, tiles))


def _check_bits(bits: int) -> None:
    if bits not in range(1, 9):
        raise ValueError(f"codes have 1 to 8 bits, not {bits}")
