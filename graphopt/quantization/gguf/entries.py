"""Codes of vectors of a tensor of a GGUF file: what the file holds, not rounded again.

            an entry        of which a code has             levels, of numbers      factors of the scale d
    IQ1_S   8 in -1, 0, 1   11 bits                         4 bits of 32            1, 3, .. 15; a bit for +-1/8
    IQ1_M   8 in -1, 0, 1   11 bits, a bit for +-1/8        3 bits of 16            1, 3, .. 15
    IQ2_XXS 8 magnitudes    8 bits, 7 signs                 4 bits of 32            1/8, 3/8, .. 31/8
    IQ2_XS  8 magnitudes    9 bits, 7 signs                 4 bits of 16            as above
    IQ2_S   8 magnitudes    10 bits, 8 signs                4 bits of 16            as above
    IQ3_XXS 4 magnitudes    two of 8 bits, 7 signs of 8     4 bits of 32            1/4, 3/4, .. 31/4
    IQ3_S   4 magnitudes    9 bits, 4 signs                 4 bits of 32            1, 3, .. 31

d is float16, for 256 numbers. All products are exact in float32, so that weights are the file's to the last bit. Grids
are those of the package ``gguf``. Entries of IQ3_XXS share signs by pairs, so a pair is one entry of 8 numbers here, a
sum of two: the first book has zeros behind its entries, the second in front of them.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphopt.quantization.entry_codes import Codebook, EntryCoding, EntryRows
from graphopt.quantization.gguf.blocks import Ggml, import_gguf
from graphopt.quantization.matrix_codes import CodedTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphopt.graph.weights import Array, Region, Shape

# An odd number of eighths, quarters, ... for each level of 4 or 3 bits.
_ODD = tuple(float(2 * level + 1) for level in range(16))


class _Parts(NamedTuple):
    """Blocks of one type taken apart: codes uint32 [blocks, entries], levels uint8 [blocks, groups], scales float16."""

    codes: Array
    levels: Array
    scales: Array


def _halves(blocks: Array, start: int) -> Array:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)


def _words(blocks: Array, start: int, stop: int, kind: str) -> Array:
    return np.ascontiguousarray(blocks[:, start:stop]).view(kind).astype(np.uint32)


def _fields(words: Array, shifts: tuple[int, ...], mask: int) -> Array:
    """Return the fields of words [blocks, words] one behind the other, uint32 [blocks, words * fields]."""
    fields = (words[..., None] >> np.array(shifts, np.uint32)) & np.uint32(mask)
    return np.asarray(fields.reshape(len(words), -1), np.uint32)


def _nibbles(blocks: Array, start: int, stop: int) -> Array:
    return _fields(blocks[:, start:stop].astype(np.uint32), (0, 4), 15).astype(np.uint8)


def _iq1_s(blocks: Array) -> _Parts:
    high = _words(blocks, 34, 50, "<u2")
    codes = blocks[:, 2:34].astype(np.uint32) | _fields(high, (0, 3, 6, 9), 7) << np.uint32(8)
    return _Parts(codes, (high >> np.uint32(12)).astype(np.uint8), _halves(blocks, 0))


def _iq1_m(blocks: Array) -> _Parts:
    # bits 0 to 2 of a nibble are of the index, bit 3 is the sign of the shift
    codes = blocks[:, :32].astype(np.uint32) | _nibbles(blocks, 32, 48).astype(np.uint32) << np.uint32(8)
    words = _words(blocks, 48, 56, "<u2")
    levels = _fields(words, (0, 3, 6, 9), 7).astype(np.uint8)
    # the scale lies in the highest four bits of four words
    scale = ((words >> np.uint32(12)) << np.array([0, 4, 8, 12], np.uint32)).sum(1, dtype=np.uint32)
    return _Parts(codes, levels, scale.astype("<u2").view(np.float16)[:, None])


def _iq2_xxs(blocks: Array) -> _Parts:
    words = _words(blocks, 2, 66, "<u4").reshape(len(blocks), 8, 2)
    indices = _fields(words[..., 0], (0, 8, 16, 24), 255)
    signs = _fields(words[..., 1], (0, 7, 14, 21), 127)
    return _Parts(
        indices | signs << np.uint32(8), (words[..., 1] >> np.uint32(28)).astype(np.uint8), _halves(blocks, 0)
    )


def _iq2_xs(blocks: Array) -> _Parts:
    return _Parts(_words(blocks, 2, 66, "<u2"), _nibbles(blocks, 66, 74), _halves(blocks, 0))


def _iq2_s(blocks: Array) -> _Parts:
    high = _fields(blocks[:, 66:74].astype(np.uint32), (0, 2, 4, 6), 3)
    codes = (
        blocks[:, 2:34].astype(np.uint32) | high << np.uint32(8) | blocks[:, 34:66].astype(np.uint32) << np.uint32(10)
    )
    return _Parts(codes, _nibbles(blocks, 74, 82), _halves(blocks, 0))


def _iq3_xxs(blocks: Array) -> _Parts:
    words = _words(blocks, 66, 98, "<u4")
    pairs = _words(blocks, 2, 66, "<u2")
    signs = _fields(words, (0, 7, 14, 21), 127)
    return _Parts(pairs | signs << np.uint32(16), (words >> np.uint32(28)).astype(np.uint8), _halves(blocks, 0))


def _iq3_s(blocks: Array) -> _Parts:
    high = _fields(blocks[:, 66:74].astype(np.uint32), tuple(range(8)), 1)
    signs = _fields(blocks[:, 74:106].astype(np.uint32), (0, 4), 15)
    codes = blocks[:, 2:66].astype(np.uint32) | high << np.uint32(8) | signs << np.uint32(9)
    return _Parts(codes, _nibbles(blocks, 106, 110), _halves(blocks, 0))


_READERS: dict[str, Callable[[Array], _Parts]] = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}


# What factors are odd numbers of, signs of a code, numbers of a level, bits of a second index.
_MAGNITUDES = {
    "IQ2_XXS": (8, 7, 32, 0),
    "IQ2_XS": (8, 7, 16, 0),
    "IQ2_S": (8, 8, 16, 0),
    "IQ3_XXS": (4, 7, 32, 8),
    "IQ3_S": (1, 4, 32, 0),
}


@cache
def codebook_of_kind(kind: str) -> Codebook:
    """Return what the codes of a type of GGML mean.

    Raises:
        MissingDependencyError: the package ``gguf`` is not installed.
    """
    quants = import_gguf().quants
    type_class = getattr(quants, kind)
    type_class.init_grid()
    grid = np.asarray(type_class.grid, np.float32).reshape(type_class.grid_shape)
    name, delta = kind.lower(), float(quants.IQ1_S.delta)
    if kind == "IQ3_XXS":
        zeros = np.zeros_like(grid)
        grid = np.concatenate([np.concatenate([grid, zeros], 1), np.concatenate([zeros, grid], 1)])
    books = tuple(map(tuple, grid.tolist()))
    index_bits = 8 if kind == "IQ3_XXS" else (len(books) - 1).bit_length()
    if kind == "IQ1_S":
        offsets = (delta,) * 8 + (-delta,) * 8
        return Codebook(name, books, index_bits, level_bits=4, factors=_ODD[:8] * 2, offsets=offsets)
    if kind == "IQ1_M":
        no_offsets, shifts = (0.0,) * 8, (delta, -delta)
        return Codebook(name, books, index_bits, 0, 0, shifts, 3, _ODD[:8], no_offsets, 16)
    part, signs, group, second_bits = _MAGNITUDES[kind]
    factors = tuple(odd / part for odd in _ODD)
    return Codebook(name, books, index_bits, second_bits, signs, (0.0,), 4, factors, (0.0,) * 16, group)


def has_entries(tensor: object) -> bool:
    """Return whether a tensor holds matrices of codes of vectors."""
    return isinstance(tensor, Ggml) and tensor.kind in _READERS and len(tensor.dims) > 1


@dataclasses.dataclass(frozen=True, eq=False)
class GgmlEntries(CodedTensor):
    """The codes of a tensor of a GGUF file, of a type in the table above; rows of stacked matrices are one matrix."""

    source: Ggml

    def __post_init__(self) -> None:
        if not has_entries(self.source):
            raise ValueError(f"{self.source} has no codes of vectors")
        rows = prod(self.source.dims[:-1])
        object.__setattr__(self, "source", dataclasses.replace(self.source, dims=(rows, self.source.dims[-1])))

    @property
    def kind(self) -> str:
        """The type."""
        return self.source.kind

    @property
    def shape(self) -> Shape:
        """Rows of all matrices, and their columns."""
        return self.source.dims

    @property
    def coding(self) -> EntryCoding:
        """As the table above has it."""
        return EntryCoding(codebook_of_kind(self.kind))

    def evaluate(self, region: Region) -> Array:
        """Decode the blocks that the region touches."""
        return self.source.evaluate(region)

    def coded_rows(self, rows: Array) -> EntryRows:
        """Return codes, levels and scales of rows."""
        blocks = np.ascontiguousarray(self.source.blocks()[rows])
        parts = _READERS[self.kind](blocks.reshape(-1, blocks.shape[-1]))
        return EntryRows(*(part.reshape(len(rows), -1) for part in parts))
