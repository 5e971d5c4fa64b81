"""Symbols and numbers come back to the bit, in about the bytes of their entropy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from graphopt.inference.states.entropy_coding import (
    SymbolReader,
    SymbolWriter,
    join,
    pack_numbers,
    split,
    unpack_numbers,
)


def test_symbols_take_the_bits_that_their_contexts_leave_open() -> None:
    random, n = np.random.default_rng(0), 20000
    contexts = random.integers(0, 3, n).astype(np.uint8)
    # 0: always 7; 1: one of two; 2: one of 16
    symbols = np.select([contexts == 0, contexts == 1], [7, random.integers(0, 2, n)], random.integers(0, 16, n))
    symbols = symbols.astype(np.uint8)
    writer = SymbolWriter(4)
    for part in (slice(0, 7), slice(7, n)):
        writer.write(symbols[part], contexts[part])
    stream = writer.bytes()
    bits = (contexts == 1).sum() * 1 + (contexts == 2).sum() * 4
    # the library loses a 2^-8th or less for each symbol of a context, and has tables of 100 bytes at most here
    assert bits / 8 * 0.999 < len(stream) < bits / 8 * 1.004 + 300
    reader = SymbolReader(stream, 4)
    runs = [reader.next_symbols(contexts[part]) for part in (slice(0, 7), slice(7, n))]
    assert np.array_equal(np.concatenate(runs), symbols)
    for context in (3, 1):  # which never had one, and which has no more
        with pytest.raises(ValueError, match="the symbols of a context end before"):
            reader.next_symbols(np.array([context], np.uint8))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.int64, ml_dtypes.bfloat16, np.bool_])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5, 7), (2, 4000)])
def test_numbers_of_any_type_come_back(dtype: type, shape: tuple[int, ...]) -> None:
    numbers = (np.random.default_rng(1).normal(size=shape) * 20).astype(dtype)
    if numbers.size > 2 and dtype in (np.float32, np.float16):
        numbers.ravel()[:3] = [np.nan, -0.0, np.inf]
    stream = pack_numbers(numbers)
    result = unpack_numbers(stream, numbers.dtype, shape)
    assert result.dtype == numbers.dtype
    assert result.tobytes() == numbers.tobytes()
    # what the library says before the numbers, and of how many
    assert len(stream) <= numbers.nbytes + 64
    if shape == (2, 4000) and dtype in (np.float32, np.int64):
        assert len(stream) < 0.9 * numbers.nbytes  # exponents, and upper bytes


def test_bytes_that_are_not_those_of_numbers_are_refused() -> None:
    stream = pack_numbers(np.arange(5000, dtype=np.float32) ** 2)
    for end in (0, 3, len(stream) // 2, len(stream) - 1):
        with pytest.raises(ValueError, match="bytes (hold|are not)"):
            unpack_numbers(stream[:end], np.dtype(np.float32), (5000,))
    with pytest.raises(ValueError, match="hold 5000 numbers of float32"):
        unpack_numbers(stream, np.dtype(np.float32), (5001,))
    with pytest.raises(ValueError, match="are not numbers of float16"):
        unpack_numbers(stream, np.dtype(np.float16), (5000,))


def test_parts_are_split_where_they_were_joined() -> None:
    parts = [np.arange(count, dtype=np.uint8) for count in (3, 0, 5)]
    whole = join(parts)
    assert [part.tolist() for part in split(whole, 3)] == [part.tolist() for part in parts]
    for wrong in (whole[:-1], whole[:5], np.append(whole, np.uint8(1))):
        with pytest.raises(ValueError, match="are not 3 parts"):
            split(wrong, 3)
