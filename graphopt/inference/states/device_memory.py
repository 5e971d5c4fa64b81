"""States in memory of a GPU, through the C interface of graphopt's library (``cuda/c_interface.h``).

onnxruntime is given pointers and copies nothing. Each call waits until it is done, and onnxruntime waits for its own
stream at the end of a run, so neither reads unfinished results of the other.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.errors import InputError
from graphopt.inference.states.buffers import Buffer, HostMemory, Memory
from graphopt.runtime_ops import library_path

if TYPE_CHECKING:
    from pathlib import Path

    import onnxruntime

    from graphopt.inference.session import Session
    from graphopt.runtime_ops.kv_attention.spec.attributes import StateTensor

Array = npt.NDArray[Any]


class DeviceMemory:
    """Memory of the first GPU.

    Args:
        library: graphopt's library for GPUs.
    """

    device = "cuda"
    """onnxruntime's name for the device."""

    def __init__(self, library: Path) -> None:
        self._file, self._library = library, ctypes.CDLL(str(library))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        for name, arguments in (
            ("allocate", [ctypes.POINTER(pointer), size]),
            ("copy", [pointer, size, pointer, size, size, size]),
            ("memory_left", [ctypes.POINTER(size)]),
        ):
            function = getattr(self._library, f"graphopt_cuda_{name}")
            function.argtypes, function.restype = arguments, ctypes.c_char_p
        self._library.graphopt_cuda_free.argtypes, self._library.graphopt_cuda_free.restype = [pointer], None

    def zeros(self, tensor: StateTensor) -> Buffer:
        """See :meth:`graphopt.inference.states.buffers.Memory.zeros`."""
        return DeviceBuffer(self, tuple(int(size) for size in tensor.shape), tensor.dtype)

    def available(self) -> int:
        """Return the bytes that the driver could still allocate, without what onnxruntime holds in advance."""
        size = ctypes.c_size_t()
        self._check(self._library.graphopt_cuda_memory_left(ctypes.byref(size)))
        return size.value

    def allocate(self, owner: object, size: int) -> int:
        """Return the address of ``size`` bytes of zeros, which are freed when ``owner`` is collected."""
        pointer = ctypes.c_void_p()
        self._check(self._library.graphopt_cuda_allocate(ctypes.byref(pointer), size))
        # at the end of a process the driver frees everything, and may be unloaded before this runs
        weakref.finalize(owner, self._library.graphopt_cuda_free, pointer.value).atexit = False
        return pointer.value or 0

    def copy(self, target: int, target_pitch: int, source: int, source_pitch: int, size: int, rows: int) -> None:
        """Copy ``rows`` runs of ``size`` bytes, which begin a pitch apart, from and to the host or the GPU."""
        self._check(self._library.graphopt_cuda_copy(target, target_pitch, source, source_pitch, size, rows))

    def _check(self, failure: bytes | None) -> None:
        if failure is not None:
            raise InputError(f"GPU memory: {failure.decode()}", file=self._file)


class DeviceBuffer(Buffer):
    """A state tensor in memory of a GPU."""

    def __init__(self, memory: DeviceMemory, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype = shape, dtype
        self._memory = memory
        self._pointer = memory.allocate(self, self.nbytes)
        self._page_bytes = int(np.prod(shape[3:])) * dtype.itemsize  # bytes
        self._head = shape[2] * self._page_bytes
        self._bound = (memory.device, 0, int(ir.DataType.from_numpy(dtype)), shape, self._pointer)

    def array_of(self, pages: int) -> Array:
        """See :meth:`Buffer.array_of`: a copy."""
        copy = np.empty((*self.shape[:2], pages, *self.shape[3:]), self.dtype)
        size = pages * self._page_bytes
        self._memory.copy(copy.ctypes.data, size, self._pointer, self._head, size, self.shape[0] * self.shape[1])
        return copy

    def get(self, row: int, page: int) -> Array:
        """See :meth:`Buffer.get`: a copy."""
        copy = np.empty((self.shape[1], *self.shape[3:]), self.dtype)
        address = self._address(row, page, 1)
        self._memory.copy(copy.ctypes.data, self._page_bytes, address, self._head, self._page_bytes, self.shape[1])
        return copy

    def write(self, row: int, first: int, numbers: Array) -> None:
        """See :meth:`Buffer.write`."""
        numbers = np.ascontiguousarray(numbers, self.dtype)
        address, size = self._address(row, first, numbers.shape[1]), numbers.shape[1] * self._page_bytes
        self._memory.copy(address, self._head, numbers.ctypes.data, size, size, self.shape[1])

    def copy(self, row: int, first: int, source: Buffer, source_row: int, source_first: int, pages: int) -> None:
        """See :meth:`Buffer.copy`."""
        assert isinstance(source, DeviceBuffer)
        target, address = self._address(row, first, pages), source._address(source_row, source_first, pages)
        self._memory.copy(target, self._head, address, source._head, pages * self._page_bytes, self.shape[1])

    def bind_input(self, binding: onnxruntime.IOBinding, name: str) -> None:
        """See :meth:`Buffer.bind_input`."""
        binding.bind_input(name, *self._bound)

    def bind_output(self, binding: onnxruntime.IOBinding, name: str) -> None:
        """See :meth:`Buffer.bind_output`."""
        binding.bind_output(name, *self._bound)

    def _address(self, row: int, first: int, pages: int) -> int:
        """Return the address of pages of a row, after checking that they exist."""
        if not (0 <= row < self.shape[0] and first >= 0 and first + pages <= self.shape[2]):
            raise IndexError(f"pages {first} to {first + pages} of row {row} of a state {list(self.shape)}")
        return self._pointer + row * self.shape[1] * self._head + first * self._page_bytes


def memory_of(session: Session) -> Memory:
    """Return the memory that a session's kernels compute in; for bodies onnxruntime copies from any memory."""
    library = library_path(session.device)
    if session.device == "cpu" or library is None or not session.in_place:
        return HostMemory()
    return DeviceMemory(library)
