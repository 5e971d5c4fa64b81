"""Streams come back to the bit, in about the bytes of their entropy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from graphopt.inference.states.entropy_coding import (
    FrequencyTables,
    SymbolDecoder,
    SymbolEncoder,
    pack_planes,
    unpack_planes,
)


def test_symbols_take_the_bits_that_their_contexts_leave_open() -> None:
    random, n = np.random.default_rng(0), 20000
    contexts = random.integers(0, 3, n).astype(np.uint16)
    # 0: always 7; 1: one of two; 2: one of 16
    symbols = np.select([contexts == 0, contexts == 1], [7, random.integers(0, 2, n)], random.integers(0, 16, n))
    symbols = symbols.astype(np.uint8)
    totals = np.bincount(contexts.astype(np.int64) * 16 + symbols, minlength=64).reshape(4, 16)
    tables = FrequencyTables.of_totals(totals * 1000)  # above what 16 bits hold
    assert (tables.counts > 0).tolist() == (totals > 0).tolist()
    encoder = SymbolEncoder(tables)
    for part in (slice(0, 7), slice(7, n)):
        encoder.encode(symbols[part], contexts[part])
    stream = encoder.bytes()
    bits = (contexts == 1).sum() * 1 + (contexts == 2).sum() * 4
    # the coder loses a 2^-12th or less for each symbol of a context that occurs, and a word at the end
    assert bits / 8 * 0.999 < len(stream) < bits / 8 * 1.002 + 64
    decoder = SymbolDecoder(tables, stream)
    found = [decoder.decode(contexts[part]) for part in (slice(0, 7), slice(7, n))]
    assert np.array_equal(np.concatenate(found), symbols)
    with pytest.raises(ValueError, match="context 3, whose frequencies are all 0"):
        SymbolDecoder(tables, stream).decode(np.array([3], np.uint16))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.int64, ml_dtypes.bfloat16, np.bool_])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5, 7), (2, 4000)])
def test_numbers_of_any_type_come_back(dtype: type, shape: tuple[int, ...]) -> None:
    numbers = (np.random.default_rng(1).normal(size=shape) * 20).astype(dtype)
    packed = pack_planes(numbers)
    found = unpack_planes(packed, numbers.dtype, shape)
    assert found.dtype == numbers.dtype
    assert found.tobytes() == numbers.tobytes()
    # 5 bytes before each plane
    assert len(packed) <= numbers.nbytes + 5 * numbers.itemsize
    if shape == (2, 4000) and dtype in (np.float32, np.int64):
        assert len(packed) < 0.9 * numbers.nbytes  # exponents, and upper bytes


def test_planes_that_are_cut_off_are_refused() -> None:
    packed = pack_planes(np.arange(5000, dtype=np.float32))
    for end in (3, len(packed) - 1, len(packed) // 2):
        with pytest.raises(ValueError, match="plane|bytes end before"):
            unpack_planes(packed[:end], np.dtype(np.float32), (5000,))
