from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.runtime_ops.matmul_table.spec.packing import pack, tile, unpack, untile

BITS = st.integers(1, 8)
SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 50))


def codes_of(shape: tuple[int, int], bits: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**bits, shape).astype(np.uint8)


def by_definition(codes: np.ndarray, bits: int) -> np.ndarray:
    """The layout, written down position by position."""
    rows, columns = codes.shape
    packed = np.zeros((-(-columns // 16), -(-rows // 16), 32 * bits), np.uint8)
    for row in range(rows):
        for column in range(columns):
            (t, r), (u, k) = divmod(column, 16), divmod(row, 16)
            position = k // 4 * 64 + r * 4 + k % 4
            for width in (8, 4, 2, 1):
                first, end = bits // (2 * width) * 2 * width, bits // width * width
                if first == end:
                    continue
                line_bytes = 32 if width == 1 else 64
                line, rest = divmod(position, line_bytes * (8 // width))
                h, byte = divmod(rest, line_bytes)
                digits = int(codes[row, column]) >> first & 2**width - 1
                packed[t, u, 32 * first + line * line_bytes + byte] |= digits << (width * h)
    return packed


@given(SHAPES, BITS, st.integers(0, 99))
@settings(deadline=None)
def test_unpack_undoes_pack(shape: tuple[int, int], bits: int, seed: int) -> None:
    codes = codes_of(shape, bits, seed)
    packed = pack(codes, bits)
    assert packed.shape == (-(-shape[1] // 16), -(-shape[0] // 16), 32 * bits)
    assert np.array_equal(unpack(packed, *shape), codes)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("shape", [(16, 16), (37, 20)])
def test_the_layout_is_the_definition(bits: int, shape: tuple[int, int]) -> None:
    codes = codes_of(shape, bits)
    assert np.array_equal(pack(codes, bits), by_definition(codes, bits))


def test_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = codes_of((40, 100), 6)
    whole = pack(codes, 6)
    monkeypatch.setattr("graphopt.runtime_ops.matmul_table.spec.packing._BLOCK", 1600)  # two tiles of three units
    assert np.array_equal(pack(codes, 6), whole)
    assert np.array_equal(unpack(whole, 40, 100), codes)


@given(st.integers(1, 5), st.integers(1, 50), st.sampled_from([np.float16, np.float32]))
def test_untile_undoes_tile(groups: int, columns: int, dtype: type) -> None:
    scales = np.random.default_rng(0).standard_normal((groups, columns)).astype(dtype)
    tiled = tile(scales)
    assert (tiled.shape, tiled.dtype) == ((-(-columns // 16), groups, 16), dtype)
    assert tiled[columns // 17, groups - 1, 0] == scales[groups - 1, columns // 17 * 16]
    assert np.array_equal(untile(tiled, columns), scales)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="code 8 does not fit 3 bits"):
        pack(np.full((2, 2), 8, np.uint8), 3)
    with pytest.raises(ValueError, match="1 to 8 bits, not 9"):
        pack(np.zeros((2, 2), np.uint8), 9)
    with pytest.raises(ValueError, match=r"must be uint8 \[K, N\], they are int64 \[2, 2\]"):
        pack(np.zeros((2, 2), np.int64), 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"17 x 5 weight are uint8 \[1, 2, 32 bits\], these are uint8 \[1, 1, 96\]"):
        unpack(np.zeros((1, 1, 96), np.uint8), 17, 5)
    with pytest.raises(ValueError, match="1 to 8 bits, not 0"):
        unpack(np.zeros((1, 1, 0), np.uint8), 5, 5)
