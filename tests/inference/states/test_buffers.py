"""Buffers of the host and of a GPU do the same to the same numbers; the GPU is the host interpreter."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.errors import InputError
from graphopt.inference.states.buffers import Buffer, HostMemory, Memory, Row
from graphopt.inference.states.device_memory import DeviceMemory
from graphopt.runtime_ops.kv_attention.spec.attributes import FLOATS, StateTensor

TYPES = (*FLOATS.values(), np.dtype(np.uint8))
SIZES = st.integers(1, 4)


@pytest.fixture(scope="module")
def memory(interpreted_library: Path) -> DeviceMemory:
    return DeviceMemory(interpreted_library)


def numbers(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """Any bits, as a copy must not look at what it copies."""
    octets = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return octets.view(dtype).reshape(shape)


def equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and np.ascontiguousarray(a).tobytes() == b.tobytes()


@given(
    dtype=st.sampled_from(TYPES),
    sizes=st.tuples(SIZES, SIZES, SIZES, st.integers(1, 5)),
    spare=st.integers(0, 3),
    data=st.data(),
)
def test_they_agree(
    memory: DeviceMemory, dtype: np.dtype, sizes: tuple[int, int, int, int], spare: int, data: st.DataObject
) -> None:
    batch, heads, positions, size = sizes
    shape, larger = (batch, heads, positions, size), (batch + 1, heads, positions + spare, size)
    count = data.draw(st.integers(1, positions))
    row, to_row = data.draw(st.integers(0, batch - 1)), data.draw(st.integers(0, batch))
    first, to_first = data.draw(st.integers(0, positions - count)), data.draw(st.integers(0, positions + spare - count))

    def use(device: Memory) -> list[np.ndarray]:
        source, target = device.zeros(StateTensor(shape, dtype)), device.zeros(StateTensor(larger, dtype))
        for index in range(batch):
            source.write(index, 0, numbers(shape[1:], dtype, index))
        source.write(row, first, numbers((heads, count, size), dtype, 10))
        Row(source, row).write(first, numbers((heads, size), dtype, 11))
        target.copy(to_row, to_first, source, row, first, count)
        assert source.nbytes == batch * heads * positions * size * dtype.itemsize
        rows = [Row(buffer, row).get(first) for buffer in (source, target)]
        return [*rows, source.array_of(count), source.array_of(positions), target.array_of(positions + spare)]

    expected, result = use(HostMemory()), use(memory)
    assert all(equal(*pair) for pair in zip(expected, result, strict=True))
    # and they are not all zeros
    assert equal(expected[-1][to_row, :, to_first], expected[0])
    assert not equal(expected[0], np.zeros_like(expected[0])) or size * heads * dtype.itemsize < 3


def test_places_that_are_not_there_are_an_error_before_anything_is_copied(memory: DeviceMemory) -> None:
    buffer = memory.zeros(StateTensor((2, 3, 4, 5)))
    for row, first, count in ((2, 0, 1), (-1, 0, 1), (0, 4, 1), (0, -1, 1), (0, 2, 3)):
        with pytest.raises(IndexError, match=r"of row .* of a state \[2, 3, 4, 5\]"):
            buffer.write(row, first, np.ones((3, count, 5), np.float32))
        with pytest.raises(IndexError):
            buffer.copy(0, 0, buffer, row, first, count)
    assert not buffer.array_of(4).any()


def test_memory_that_cannot_be_had_is_an_error_that_names_the_library(memory: DeviceMemory) -> None:
    with pytest.raises(InputError, match=r"GPU memory: .*memory"):
        memory.zeros(StateTensor((1, 1, 1 << 30, 1 << 30)))


def test_memory_comes_back_with_its_last_user(memory: DeviceMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    pointers = []
    free = memory._library.graphopt_cuda_free
    monkeypatch.setattr(
        memory._library, "graphopt_cuda_free", lambda address: (pointers.append(address), free(address))
    )
    buffer: Buffer | None = memory.zeros(StateTensor((1, 2, 3, 4)))
    assert buffer is not None
    pointer = buffer._pointer
    row: Row | None = Row(buffer, 0)
    del buffer
    gc.collect()
    assert pointers == []
    row = None
    gc.collect()
    assert pointers == [pointer]
    assert row is None


def test_there_is_memory_left(memory: DeviceMemory) -> None:
    assert 1 << 20 < memory.available() < 1 << 50
