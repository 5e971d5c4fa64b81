"""Bytes in fewer bytes, by a range coder: `constriction` (Bamler 2022, arXiv 2201.01741).

    symbols, each with a context -> one table of frequencies per context -> a stream of about their entropy

The streams of symbols and the tables are those that lie in a file; what they stand for is the business of others.
Beside `zstandard`, which is many times faster, files of int4 pages are 6% smaller (tools/bench/prompt_cache.py): its
Huffman codes know no contexts.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import TYPE_CHECKING, Any

import constriction
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Contexts = npt.NDArray[np.uint16]
Counts = npt.NDArray[np.uint16]

_MOST_COUNTS = (1 << 16) - 1

_WORD = np.dtype("<u4")
"""Of the range coder."""

_PLANE = struct.Struct("<BI")
"""Before a plane: how it is stored, and in how many bytes."""

_AS_IT_IS, _BY_FREQUENCY = 0, 1

_WORTHWHILE = 0.97
"""A plane that would keep more than this share of its bytes is stored as it is, which is read faster."""


class FrequencyTables:
    """How often each symbol comes in each context.

    Args:
        counts: uint16 [contexts, symbols]: frequencies, which both ends must know.
    """

    def __init__(self, counts: Counts) -> None:
        self.counts = counts

    @classmethod
    def of_totals(cls, totals: npt.NDArray[np.int64]) -> FrequencyTables:
        """Return tables for counts of any size, int64 [contexts, symbols]: what occurs keeps a frequency above 0."""
        largest = totals.max(axis=1, keepdims=True)
        shrunk = -(-totals * _MOST_COUNTS // np.maximum(largest, _MOST_COUNTS))
        return cls(shrunk.astype(np.uint16))

    @cached_property
    def models(self) -> list[Any]:
        """The library's model of each context; ``None`` where nothing occurs."""
        totals = self.counts.sum(axis=1, dtype=np.int64)
        return [
            constriction.stream.model.Categorical(row / np.float64(total), perfect=False) if total else None
            for row, total in zip(self.counts, totals.tolist(), strict=True)
        ]


class SymbolEncoder:
    """A stream of symbols that grows.

    Args:
        tables: frequencies, of all symbols that come.
    """

    def __init__(self, tables: FrequencyTables) -> None:
        self._tables, self._stream = tables, constriction.stream.queue.RangeEncoder()

    def encode(self, symbols: Bytes, contexts: Contexts) -> None:
        """Append symbols, uint8 [n], each of its context, uint16 [n]."""
        order, runs = _by_context(contexts, len(self._tables.counts))
        symbols_in_order = symbols[order].astype(np.int32)
        for context, first, end in runs:
            self._stream.encode(symbols_in_order[first:end], self._tables.models[context])

    def bytes(self) -> Bytes:
        """Return the stream, uint8 [bytes]."""
        return np.ascontiguousarray(self._stream.get_compressed().astype(_WORD)).view(np.uint8)


class SymbolDecoder:
    """Symbols of a stream, in the order and the groups in which they were encoded.

    Args:
        tables: those of the encoder.
        stream: uint8 [bytes].
    """

    def __init__(self, tables: FrequencyTables, stream: Bytes) -> None:
        words = stream.view(_WORD).astype(np.uint32)
        self._tables, self._stream = tables, constriction.stream.queue.RangeDecoder(words)

    def decode(self, contexts: Contexts) -> Bytes:
        """Return the next symbols, uint8 [n], for contexts uint16 [n].

        Raises:
            ValueError: the stream is not one of these tables.
        """
        order, runs = _by_context(contexts, len(self._tables.counts))
        in_order = np.empty(len(contexts), np.uint8)
        for context, first, end in runs:
            model = self._tables.models[context]
            if model is None:
                raise ValueError(f"the stream has symbols of context {context}, whose frequencies are all 0")
            in_order[first:end] = self._stream.decode(model, end - first)
        symbols = np.empty_like(in_order)
        symbols[order] = in_order
        return symbols


def _by_context(contexts: Contexts, count: int) -> tuple[Array, Iterator[tuple[int, int, int]]]:
    """Return the order by context, and of each context that occurs its number, and its first and last place in that."""
    sizes = np.bincount(contexts, minlength=count)
    ends = np.cumsum(sizes)
    occurring = np.flatnonzero(sizes)
    runs = zip(occurring.tolist(), (ends - sizes)[occurring].tolist(), ends[occurring].tolist(), strict=True)
    return np.argsort(contexts, kind="stable"), runs


def pack_planes(numbers: Array) -> Bytes:
    """Return numbers of any type as bytes: their first bytes, their second bytes and so on, each by its frequencies.

    Exponents of floats are alike, and so are the upper bytes of small integers; what is not, as the lower bytes of
    floats, stays as it is.

    Args:
        numbers: of any shape.

    Returns:
        uint8 [bytes].
    """
    planes = np.ascontiguousarray(numbers).reshape(-1, 1).view(np.uint8).reshape(-1, numbers.itemsize)
    parts = []
    for plane in planes.T:
        totals = np.bincount(plane, minlength=256).astype(np.int64)[None]
        shares = totals[totals > 0] / max(1, len(plane))
        packed_bytes = -(shares * np.log2(shares)).sum() * len(plane) / 8 + 2 * totals.size
        if packed_bytes > _WORTHWHILE * len(plane):
            method, content = _AS_IT_IS, np.ascontiguousarray(plane)
        else:
            tables = FrequencyTables.of_totals(totals)
            encoder = SymbolEncoder(tables)
            encoder.encode(np.ascontiguousarray(plane), np.zeros(len(plane), np.uint16))
            frequencies = tables.counts.astype("<u2").view(np.uint8).ravel()
            method, content = _BY_FREQUENCY, np.concatenate([frequencies, encoder.bytes()])
        parts += [np.frombuffer(_PLANE.pack(method, len(content)), np.uint8), content]
    return np.concatenate(parts)


def unpack_planes(content: Bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return what :func:`pack_planes` was given.

    Raises:
        ValueError: the bytes are not those of so many numbers of this type.
    """
    count, begin = int(np.prod(shape)), 0
    planes = np.empty((count, dtype.itemsize), np.uint8)
    for index in range(dtype.itemsize):
        if begin + _PLANE.size > len(content):
            raise ValueError(f"{len(content)} bytes end before plane {index} of {count} numbers of {dtype.name}")
        method, size = _PLANE.unpack(content[begin : begin + _PLANE.size].tobytes())
        begin += _PLANE.size
        part, begin = content[begin : begin + size], begin + size
        plane_size = count if method == _AS_IT_IS else size
        if len(part) != plane_size or (method == _BY_FREQUENCY and (size < 512 or size % 4)):
            raise ValueError(f"plane {index} of {count} numbers of {dtype.name} has {len(part)} bytes")
        if method == _BY_FREQUENCY:
            counts = part[:512].copy().view("<u2").astype(np.uint16)[None]
            part = SymbolDecoder(FrequencyTables(counts), part[512:].copy()).decode(np.zeros(count, np.uint16))
        planes[:, index] = part
    return planes.reshape(-1).view(dtype).reshape(shape)
