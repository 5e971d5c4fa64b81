"""Numbers in about the bytes of their entropy, by `pcodec` (Loncaric et al. 2025, arXiv 2502.06112).

    numbers of any type               -> bins of their values, by a table of tANS -> bytes
    symbols, each with a context      -> the symbols of each context, in order -> such bytes for each context

A stream of a context holds nothing but its symbols, so all streams are decoded at once, however the context of a symbol
depends on those before it; which stream the next symbol comes from is decided afterwards. A range coder, where each
symbol waits for the one before it, cannot do that. `tools/bench/prompt_cache.py` measures bytes and times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

_LEVEL = 8
"""Of the library: up to 2^8 bins, one for each value of a byte."""

_SIZE = np.dtype("<u4")


def pack_numbers(numbers: Array) -> Bytes:
    """Return numbers of any type as bytes: what is alike in them, such as exponents, takes few.

    Args:
        numbers: of any shape.

    Returns:
        uint8 [bytes].
    """
    return _compress(numbers.ravel().view(_type_in_file(numbers.dtype)), "auto") if numbers.size else _NO_BYTES


def unpack_numbers(content: Bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return what :func:`pack_numbers` was given.

    Raises:
        ValueError: the bytes are not those of so many numbers of this type.
    """
    in_file = _decompress(content, _type_in_file(dtype))
    if in_file.size != np.prod(shape):
        raise ValueError(f"{len(content)} bytes hold {in_file.size} numbers of {dtype.name}, not {list(shape)}")
    return in_file.view(dtype).reshape(shape)


def join(parts: Sequence[Bytes]) -> Bytes:
    """Return parts as one, behind their sizes; :func:`split` returns them."""
    return np.concatenate([np.array([len(part) for part in parts], _SIZE).view(np.uint8), *parts])


def split(content: Bytes, count: int) -> list[Bytes]:
    """Return ``count`` parts that :func:`join` was given.

    Raises:
        ValueError: the bytes end before, or behind, the last of them.
    """
    begin = count * _SIZE.itemsize
    sizes = content[:begin].copy().view(_SIZE) if len(content) >= begin else content[:0]
    ends = sizes.cumsum(dtype=np.int64)
    if not len(ends) or begin + ends[-1] != len(content):
        raise ValueError(f"{len(content)} bytes are not {count} parts")
    return np.split(content[begin:], ends[:-1])


class _ContextOrder:
    """The places of symbols by context, sorted once where the same array of contexts comes again and again."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._contexts: Bytes | None = None

    def order_and_sizes(self, contexts: Bytes) -> tuple[Array, Array]:
        """Return the places of symbols, int64 [n], context by context, and how many each context has."""
        if contexts is not self._contexts:
            self._contexts = contexts
            self._indices = contexts.argsort(kind="stable")
            self._sizes = np.bincount(contexts, minlength=self._count)
        return self._indices, self._sizes


class SymbolWriter:
    """Symbols that come with a context each.

    Args:
        contexts: how many there are, 256 at most.
    """

    def __init__(self, contexts: int) -> None:
        self._parts: list[list[Bytes]] = [[] for _ in range(contexts)]
        self._order = _ContextOrder(contexts)

    def write(self, symbols: Bytes, contexts: Bytes) -> None:
        """Append symbols, uint8 [n], each of its context, uint8 [n]."""
        order, sizes = self._order.order_and_sizes(contexts)
        ends, in_order = sizes.cumsum().tolist(), symbols[order]
        for part, begin, end in zip(self._parts, [0, *ends], ends, strict=False):
            if begin < end:
                part.append(in_order[begin:end])

    def bytes(self) -> Bytes:
        """Return all that was written, uint8 [bytes]."""
        streams = (np.concatenate([_NO_BYTES, *part]) for part in self._parts)
        return join([_compress(stream, "symbols") if len(stream) else _NO_BYTES for stream in streams])


class SymbolReader:
    """Symbols that a :class:`SymbolWriter` wrote, in the same order and the same groups.

    Args:
        content: uint8 [bytes].
        contexts: as of the writer.

    Raises:
        ValueError: they are not the bytes of so many contexts.
    """

    def __init__(self, content: Bytes, contexts: int) -> None:
        self._streams = [_decompress(part, np.dtype(np.uint8)) for part in split(content, contexts)]
        self._begins, self._order = np.zeros(contexts, np.int64), _ContextOrder(contexts)

    def next_symbols(self, contexts: Bytes) -> Bytes:
        """Return the next symbols, uint8 [n], for contexts uint8 [n].

        Raises:
            ValueError: there are fewer symbols of a context.
        """
        order, sizes = self._order.order_and_sizes(contexts)
        ends = self._begins + sizes
        parts = [
            stream[begin:end]
            for stream, begin, end in zip(self._streams, self._begins.tolist(), ends.tolist(), strict=True)
        ]
        in_order, self._begins = np.concatenate(parts), ends
        if len(in_order) != len(contexts):
            raise ValueError("the symbols of a context end before those that are asked for")
        symbols = np.empty_like(in_order)
        symbols[order] = in_order
        return symbols


_NO_BYTES: Bytes = np.zeros(0, np.uint8)


def _type_in_file(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type that the library stores numbers as; to the bit where it does not know theirs."""
    return dtype if dtype.kind in "iuf" and dtype.itemsize > 1 else np.dtype(f"u{dtype.itemsize}")


def _compress(numbers: Array, kind: Literal["auto", "symbols"]) -> Bytes:
    from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone

    # symbols of a context do not follow one another
    delta, mode = (DeltaSpec.auto(), ModeSpec.auto()) if kind == "auto" else (DeltaSpec.no_op(), ModeSpec.classic())
    config = ChunkConfig(compression_level=_LEVEL, delta_spec=delta, mode_spec=mode, enable_8_bit=True)
    return np.frombuffer(standalone.simple_compress(numbers, config), np.uint8)


def _decompress(content: Bytes, dtype: np.dtype[Any]) -> Array:
    """Return the numbers of bytes, [n].

    Raises:
        ValueError: they are not bytes of such numbers.
    """
    from pcodec import standalone

    if not len(content):
        return np.zeros(0, dtype)
    try:
        numbers: Array | None = standalone.simple_decompress(content.tobytes())
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{len(content)} bytes are not numbers of {dtype.name}: {error}") from error
    if numbers is None or numbers.dtype != dtype:
        raise ValueError(f"{len(content)} bytes are not numbers of {dtype.name}")
    return numbers
