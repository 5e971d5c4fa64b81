"""Where states in pages lie: tensors [batch, KV heads, pages, ...] in memory of the host, or of a GPU.

A page may be a slot for a page that is still floats. The graph reads and writes a buffer where it lies. The host edits
some pages of a row, of all heads at once, when states grow or is rewound, copied or saved; for a GPU see
:mod:`graphopt.inference.states.device_memory`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from graphopt.inference.states.large_pages import aligned_zeros
from graphopt.ort.session import ort_value
from graphopt.util.memory import available_memory

if TYPE_CHECKING:
    import onnxruntime

    from graphopt.runtime_ops.kv_attention.spec.attributes import StateTensor

Array = npt.NDArray[Any]


class Buffer(ABC):
    """A state tensor: zeros, until something is written.

    Attributes:
        shape: [batch, KV heads, pages, ...].
        dtype: of its numbers.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def pages(self) -> int:
        """Pages, or slots, of each head of a row."""
        return self.shape[2]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    @abstractmethod
    def array_of(self, pages: int) -> Array:
        """Return the first pages of all rows, [batch, KV heads, pages, ...], without a copy where possible."""

    @abstractmethod
    def get(self, row: int, page: int) -> Array:
        """Return a page of a row, [KV heads, ...], which may be the buffer's own memory."""

    @abstractmethod
    def write(self, row: int, first: int, numbers: Array) -> None:
        """Write pages from ``first`` on of a row, [KV heads, pages, ...]."""

    @abstractmethod
    def copy(self, row: int, first: int, source: Buffer, source_row: int, source_first: int, pages: int) -> None:
        """Copy pages of a row of another buffer to a row of this one.

        Args:
            row: of this buffer.
            first: of its pages, where the first one goes.
            source: a buffer in the same memory, with the same number of heads and of numbers per page.
            source_row: of that.
            source_first: the first of its pages.
            pages: how many.
        """

    @abstractmethod
    def bind_input(self, binding: onnxruntime.IOBinding, name: str) -> None:
        """Let a run read it as the graph's input ``name``."""

    @abstractmethod
    def bind_output(self, binding: onnxruntime.IOBinding, name: str) -> None:
        """Let a run write it as the graph's output ``name``."""


class Memory(Protocol):
    """Memory that buffers are allocated in."""

    def zeros(self, tensor: StateTensor) -> Buffer:
        """Return a buffer of zeros.

        Raises:
            InputError: the memory cannot be allocated.
        """

    def available(self) -> int:
        """Return the bytes that could still be allocated."""


@dataclass(frozen=True)
class Row:
    """One row of a buffer."""

    buffer: Buffer
    row: int

    @property
    def pages(self) -> int:
        """See :class:`Buffer`."""
        return self.buffer.pages

    def get(self, page: int) -> Array:
        """See :meth:`Buffer.get`."""
        return self.buffer.get(self.row, page)

    def write(self, page: int, numbers: Array) -> None:
        """Write one page, [KV heads, ...]."""
        self.buffer.write(self.row, page, numbers[:, None])


class HostBuffer(Buffer):
    """An array of NumPy, which onnxruntime sees without a copy.

    Args:
        array: [batch, KV heads, pages, ...], contiguous.
    """

    def __init__(self, array: Array) -> None:
        self.shape, self.dtype = array.shape, array.dtype
        self.array = array
        self._value = ort_value(array)

    def row(self, row: int) -> HostBuffer:
        """Return one row as a buffer of its own, in the same memory."""
        return HostBuffer(self.array[row : row + 1])

    def array_of(self, pages: int) -> Array:
        """See :meth:`Buffer.array_of`."""
        return self.array[:, :, :pages]

    def get(self, row: int, page: int) -> Array:
        """See :meth:`Buffer.get`."""
        content: Array = self.array[row, :, page]
        return content

    def write(self, row: int, first: int, numbers: Array) -> None:
        """See :meth:`Buffer.write`."""
        self.array[row, :, first : first + numbers.shape[1]] = numbers

    def copy(self, row: int, first: int, source: Buffer, source_row: int, source_first: int, pages: int) -> None:
        """See :meth:`Buffer.copy`."""
        assert isinstance(source, HostBuffer)
        self.write(row, first, source.array[source_row, :, source_first : source_first + pages])

    def bind_input(self, binding: onnxruntime.IOBinding, name: str) -> None:
        """See :meth:`Buffer.bind_input`."""
        binding.bind_ortvalue_input(name, self._value)

    def bind_output(self, binding: onnxruntime.IOBinding, name: str) -> None:
        """See :meth:`Buffer.bind_output`."""
        binding.bind_ortvalue_output(name, self._value)


class HostMemory:
    """Memory of the host."""

    def zeros(self, tensor: StateTensor) -> Buffer:
        """See :meth:`Memory.zeros`."""
        return HostBuffer(aligned_zeros(tuple(int(size) for size in tensor.shape), tensor.dtype))

    def available(self) -> int:
        """See :func:`graphopt.util.memory.available_memory`."""
        return available_memory()
