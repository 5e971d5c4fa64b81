"""``cuda/c_interface.h`` for Python: its structs, and calls on arrays, which the host interpreter or a GPU computes."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

TYPES = {np.dtype(np.float32): 1, np.dtype(np.float16): 10, np.dtype(ml_dtypes.bfloat16): 16}
"""Types of numbers, as ONNX counts them."""


class Factor(ctypes.Structure):
    _fields_ = [
        ("outer", ctypes.c_int32),
        ("core", ctypes.c_int32),
        ("inner", ctypes.c_int32),
        ("sign", ctypes.c_int32),
        ("parts", ctypes.c_int32 * 4),
        ("signs", ctypes.c_void_p),
    ]


class Hadamard(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("runs", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("left", Factor),
        ("right", Factor),
        ("scratch", ctypes.c_void_p),
    ]


class SwiGLU(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int32),
        ("type", ctypes.c_int32),
    ]


class SplitRotary(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "queries", "keys", "values")),
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "size", "rotary", "interleaved", "type")),
    ]


class Buffer:
    """An array in memory of the device that a library computes on: the host's own for the interpreter.

    Args:
        library: the library, as :func:`declare` returns it.
        array: what to put there; its bytes are copied, to a multiple of 256 bytes and ``shift`` numbers on.
        shift: numbers before the first.
    """

    def __init__(self, library: ctypes.CDLL, array: np.ndarray[Any, Any], *, shift: int = 0) -> None:
        self._shape, self._dtype = array.shape, array.dtype
        skipped = shift * array.itemsize
        whole = np.zeros(skipped + max(array.nbytes, 1), np.uint8)
        whole[skipped : skipped + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._slice = slice(skipped, skipped + array.nbytes)
        self._memory: Any = aligned(whole)
        if library.on_gpu:
            import torch

            self._memory = torch.from_numpy(whole).cuda()
        start = self._memory.data_ptr() if library.on_gpu else self._memory.ctypes.data
        self.pointer: int = start + skipped

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a copy of what is there now, once all kernels are done."""
        memory = self._memory if isinstance(self._memory, np.ndarray) else self._memory.cpu().numpy()
        array: np.ndarray[Any, Any] = memory[self._slice].copy().view(self._dtype).reshape(self._shape)
        return array


def declare(library: ctypes.CDLL, *, on_gpu: bool = False) -> ctypes.CDLL:
    """Tell ctypes what the functions of the C interface take and return, and us where their memory is."""
    library.on_gpu = on_gpu
    matrix = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_char_p)]
    library.graphopt_cuda_hadamard_factor.argtypes = matrix
    library.graphopt_cuda_hadamard_factor.restype = ctypes.c_size_t
    for name in ("hadamard", "kv_attention"):
        call, scratch = (getattr(library, f"graphopt_cuda_{name}{suffix}") for suffix in ("", "_scratch"))
        call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_char_p
        scratch.argtypes, scratch.restype = [ctypes.c_void_p], ctypes.c_size_t
    for name in ("swiglu", "split_rotary"):
        call = getattr(library, f"graphopt_cuda_{name}")
        call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_char_p
    return library


def check(failure: bytes | None) -> None:
    """Raise what a call of the interface says.

    Raises:
        RuntimeError: the library returned an error message.
    """
    if failure is not None:
        raise RuntimeError(failure.decode())


def aligned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a copy at a multiple of 256 bytes, as memory of a device is."""
    memory = np.empty(array.nbytes + 256, np.uint8)
    copy = memory[-memory.ctypes.data % 256 :][: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def factor(library: ctypes.CDLL, matrix: np.ndarray[Any, Any]) -> tuple[Factor, Buffer]:
    """Return a matrix of signs as the kernel takes it, and the memory that it points to."""
    made, failure = Factor(), ctypes.c_char_p()
    matrix = np.ascontiguousarray(matrix, np.int8)
    arguments = (matrix.ctypes.data, len(matrix), ctypes.byref(made))
    size = library.graphopt_cuda_hadamard_factor(*arguments, None, ctypes.byref(failure))
    check(failure.value)
    packed = np.zeros(max(size, 1), np.uint8)
    library.graphopt_cuda_hadamard_factor(*arguments, packed.ctypes.data, ctypes.byref(failure))
    signs = Buffer(library, packed)
    made.signs = signs.pointer
    return made, signs


def hadamard(
    library: ctypes.CDLL,
    x: np.ndarray[Any, Any],
    left: np.ndarray[Any, Any],
    right: np.ndarray[Any, Any],
    *,
    shift: int = 0,
    in_place: bool = False,
) -> np.ndarray[Any, Any]:
    """Return x [..., n] transformed by the kernel; x lies ``shift`` numbers on, and y and scratch are NaN before.

    With ``in_place`` y is where x is.
    """
    factors, kept = zip(*(factor(library, matrix) for matrix in (left, right)), strict=True)
    given = Buffer(library, x, shift=shift)
    y = given if in_place else Buffer(library, np.full(x.shape, np.nan, x.dtype), shift=shift)
    runs = x.size // (len(left) * len(right))
    call = Hadamard(given.pointer, y.pointer, runs, TYPES[x.dtype], *factors)
    size = library.graphopt_cuda_hadamard_scratch(ctypes.byref(call))
    scratch = Buffer(library, np.full(size, 0xFF, np.uint8))
    call.scratch = scratch.pointer
    check(library.graphopt_cuda_hadamard(ctypes.byref(call), None))
    result = y.numpy()
    del kept
    return result


def swiglu(library: ctypes.CDLL, x: np.ndarray[Any, Any], *, shift: int = 0) -> np.ndarray[Any, Any]:
    """Return y [rows, n] of x [rows, 2 n] by the kernel; both lie ``shift`` numbers on, and y is NaN before."""
    rows, columns = len(x), x.shape[1] // 2
    given = Buffer(library, x, shift=shift)
    y = Buffer(library, np.full((rows, columns), np.nan, x.dtype), shift=shift)
    call = SwiGLU(given.pointer, y.pointer, rows, columns, TYPES[x.dtype])
    check(library.graphopt_cuda_swiglu(ctypes.byref(call), None))
    return y.numpy()


def split_rotary(
    library: ctypes.CDLL,
    x: np.ndarray[Any, Any],
    cos: np.ndarray[Any, Any],
    sin: np.ndarray[Any, Any],
    *,
    heads: int,
    kv_heads: int,
    rotary: int,
    rotary_interleaved: int,
) -> tuple[np.ndarray[Any, Any], ...]:
    """Return queries, keys and values of x [rows, tokens, heads of all sorts] by the kernel; they are NaN before."""
    size = x.shape[-1] // (heads + 2 * kv_heads)
    inputs = [Buffer(library, array) for array in (x, cos, sin)]
    shapes = [(*x.shape[:2], count * size) for count in (heads, kv_heads, kv_heads)]
    outputs = [Buffer(library, np.full(shape, np.nan, x.dtype)) for shape in shapes]
    pointers = [buffer.pointer for buffer in (*inputs, *outputs)]
    sizes = (heads, kv_heads, size, rotary, rotary_interleaved, TYPES[x.dtype])
    call = SplitRotary(*pointers, x.shape[0] * x.shape[1], *sizes)
    check(library.graphopt_cuda_split_rotary(ctypes.byref(call), None))
    return tuple(output.numpy() for output in outputs)
