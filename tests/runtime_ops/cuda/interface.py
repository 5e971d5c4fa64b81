"""``cuda/c_interface.h`` for Python: its structs, and calls on NumPy arrays, which the host interpreter runs."""

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


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes what the functions of the C interface take and return."""
    matrix = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_char_p)]
    library.graphopt_cuda_hadamard_factor.argtypes = matrix
    library.graphopt_cuda_hadamard_factor.restype = ctypes.c_size_t
    for name in ("hadamard",):
        call, scratch = (getattr(library, f"graphopt_cuda_{name}{suffix}") for suffix in ("", "_scratch"))
        call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_char_p
        scratch.argtypes, scratch.restype = [ctypes.c_void_p], ctypes.c_size_t
    return library


def check(failure: bytes | None) -> None:
    """Raise what a call of the interface says.

    Raises:
        RuntimeError: it says something.
    """
    if failure is not None:
        raise RuntimeError(failure.decode())


def aligned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a copy at a multiple of 256 bytes, as memory of a device is."""
    memory = np.empty(array.nbytes + 256, np.uint8)
    copy = memory[-memory.ctypes.data % 256 :][: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def factor(library: ctypes.CDLL, matrix: np.ndarray[Any, Any]) -> tuple[Factor, np.ndarray[Any, Any]]:
    """Return a matrix of signs as the kernel takes it, and the memory that it points to."""
    made, failure = Factor(), ctypes.c_char_p()
    matrix = np.ascontiguousarray(matrix, np.int8)
    arguments = (matrix.ctypes.data, len(matrix), ctypes.byref(made))
    size = library.graphopt_cuda_hadamard_factor(*arguments, None, ctypes.byref(failure))
    check(failure.value)
    signs = aligned(np.zeros(max(size, 1), np.uint8))
    library.graphopt_cuda_hadamard_factor(*arguments, signs.ctypes.data, ctypes.byref(failure))
    made.signs = signs.ctypes.data
    return made, signs


def hadamard(
    library: ctypes.CDLL, x: np.ndarray[Any, Any], left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Return x [..., n] transformed by the kernel; x is taken where it lies, and y is NaN before."""
    factors, kept = zip(*(factor(library, matrix) for matrix in (left, right)), strict=True)
    y = aligned(np.full(x.shape, np.nan, x.dtype))
    runs = x.size // (len(left) * len(right))
    call = Hadamard(x.ctypes.data, y.ctypes.data, runs, TYPES[x.dtype], *factors)
    scratch = aligned(np.full(library.graphopt_cuda_hadamard_scratch(ctypes.byref(call)), 0xFF, np.uint8))
    call.scratch = scratch.ctypes.data
    check(library.graphopt_cuda_hadamard(ctypes.byref(call), None))
    del kept
    return y
