"""MatMulTable and MatMulDynamic through the C interface of ``matmul/cuda_interface.h``."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import ml_dtypes
import numpy as np

from graphopt.runtime_ops.matmul_table.activations import MODES

Case = dict[str, Any]
TYPES = {np.dtype(np.float32): 1, np.dtype(np.float16): 10, np.dtype(ml_dtypes.bfloat16): 16}
OPERANDS = ("float32", "float16", "bfloat16", "int8")
DECODERS = ("table", "wide", "table4", "int4", "int8", "e3m2", "e2m3")
ALIGNMENT = 64


class Codec(ctypes.Structure):
    """GraphoptMatMulCodec."""

    _fields_ = [
        *((name, c_int32) for name in ("operands", "decoder", "order", "bits")),
        ("flips", c_uint32),
        ("offset", c_int32),
        ("step", c_float),
        ("lookup", c_uint32 * 8),
    ]


class Weights(ctypes.Structure):
    """GraphoptMatMulWeights."""

    _fields_ = [
        ("rows", c_uint64),
        ("columns", c_uint64),
        ("bits", c_int32),
        ("entries", c_int32),
        ("codes", c_void_p),
        ("table", c_void_p),
    ]


class MatMul(ctypes.Structure):
    """GraphoptMatMul."""

    _fields_ = [
        ("x", c_void_p),
        ("y", c_void_p),
        *((name, c_uint64) for name in ("m", "rows", "columns", "group")),
        *((name, c_int32) for name in ("x_type", "scale_type", "activations", "levels")),
        ("clip", c_float),
        *((name, c_void_p) for name in ("packed", "scales", "zero_points", "bias")),
        ("codec", Codec),
        ("scratch", c_void_p),
    ]


def aligned(array: np.ndarray) -> np.ndarray:
    """Return a copy at a multiple of 64 bytes."""
    return filled(array.shape, array.dtype, array)


def filled(shape: tuple[int, ...], dtype: Any, values: Any = None) -> np.ndarray:
    """Return an array at a multiple of 64 bytes: of ``values``, or of bytes that are all ones, which is NaN."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(count + ALIGNMENT, 255, np.uint8)
    array = memory[-memory.ctypes.data % ALIGNMENT :][:count].view(dtype).reshape(shape)
    if values is not None:
        array[...] = values
    return array


def pointer(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


class Products:
    """The library's products, on NumPy arrays: the host interpreter's "device" is the host."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for name in ("graphopt_cuda_matmul_codec", "graphopt_cuda_matmul_table_scratch"):
            getattr(library, name).restype = c_size_t
        library.graphopt_cuda_matmul_operands.restype = c_int32
        library.graphopt_cuda_matmul_pack.restype = None

    def pack(self, case: Case, operands: str) -> tuple[Codec, np.ndarray]:
        """Return the codec and the packed codes with their table."""
        codes, table = aligned(case["codes"]), aligned(case["table"])
        bits = codes.shape[2] // 32
        weights = Weights(case["rows"], case["columns"], bits, len(table), pointer(codes), pointer(table))
        codec, place = Codec(), ctypes.byref
        size = self.library.graphopt_cuda_matmul_codec(place(weights), OPERANDS.index(operands), place(codec))
        packed = filled((size,), np.uint8)
        self.library.graphopt_cuda_matmul_pack(place(weights), place(codec), c_void_p(pointer(packed)))
        return codec, packed

    def operands(self, dtype: Any, activations: int) -> str:
        return OPERANDS[self.library.graphopt_cuda_matmul_operands(TYPES[np.dtype(dtype)], activations)]

    def table(self, case: Case, seed: int = 0) -> np.ndarray:
        """Return MatMulTable's y [..., N] of x's own type; ``seed`` draws the order of the interpreter's threads."""
        activations = MODES.index(case["activations"])
        x = case["x"]
        codec, packed = self.pack(case, self.operands(x.dtype, activations))
        return self.run(case, activations, codec, packed, seed)

    def run(self, case: Case, activations: int, codec: Codec, packed: np.ndarray, seed: int) -> np.ndarray:
        x = aligned(case["x"])
        m = int(np.prod(x.shape[:-1]))
        y = filled((*x.shape[:-1], case["columns"]), x.dtype)
        scales = aligned(case["scales"])
        zeros = aligned(case["zero_points"]) if case["zero_points"].any() else None
        bias = aligned(case["bias"]) if len(case["bias"]) == case["columns"] else None
        call = MatMul(
            pointer(x),
            pointer(y),
            m,
            case["rows"],
            case["columns"],
            case["group"],
            TYPES[x.dtype],
            TYPES[scales.dtype],
            activations,
            0,
            1.0,
            pointer(packed),
            pointer(scales),
            pointer(zeros),
            pointer(bias),
            codec,
            None,
        )
        scratch = filled((self.library.graphopt_cuda_matmul_table_scratch(ctypes.byref(call)),), np.uint8)
        call.scratch = pointer(scratch)
        self.library.graphopt_interpreter_seed(seed)
        failure = self.library.graphopt_cuda_matmul_table(ctypes.byref(call), None)
        if failure is not None:
            raise RuntimeError(failure.decode())
        return y
