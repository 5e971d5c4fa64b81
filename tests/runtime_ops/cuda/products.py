"""MatMulTable and MatMulDynamic through the C interface of ``matmul/cuda_interface.h``."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np

from graphopt.runtime_ops.matmul_dynamic.op import LEVELS
from graphopt.runtime_ops.matmul_table.activations import MODES
from tests.runtime_ops.cuda.interface import TYPES, Factor, check, factor

Case = dict[str, Any]
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


class MatMulDynamic(ctypes.Structure):
    """GraphoptMatMulDynamic."""

    _fields_ = [("product", MatMul), ("left", Factor), ("right", Factor)]


TO_TOKEN = 4


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
        for name in ("codec", "table_scratch", "dynamic_scratch"):
            getattr(library, f"graphopt_cuda_matmul_{name}").restype = c_size_t
        library.graphopt_cuda_matmul_operands.restype = c_int32
        library.graphopt_cuda_matmul_pack.restype = c_int32

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
        call, y, kept = self.call(case, MODES.index(case["activations"]))
        self.run("table", call, call, seed)
        del kept
        return y

    def dynamic(self, case: Case, seed: int = 0) -> np.ndarray:
        """Return MatMulDynamic's y [..., N], likewise."""
        product, y, kept = self.call(case, TO_TOKEN)
        product.levels, product.clip = LEVELS[case["bits"]], case["clip"]
        factors, signs = zip(*(factor(self.library, case[side]) for side in ("left", "right")), strict=True)
        call = MatMulDynamic(product, *factors)
        self.run("dynamic", call, call.product, seed)
        del kept, signs
        return y

    def call(self, case: Case, activations: int) -> tuple[MatMul, np.ndarray, list[Any]]:
        """Return a call without scratch, its y, and the memory that it points to."""
        x = aligned(case["x"])
        codec, packed = self.pack(case, self.operands(x.dtype, activations))
        y = filled((*x.shape[:-1], case["columns"]), x.dtype)
        scales = aligned(case["scales"])
        zeros = aligned(case["zero_points"]) if case["zero_points"].any() else None
        bias = aligned(case["bias"]) if len(case["bias"]) == case["columns"] else None
        call = MatMul(
            x=pointer(x),
            y=pointer(y),
            m=int(np.prod(x.shape[:-1])),
            rows=case["rows"],
            columns=case["columns"],
            group=case["group"],
            x_type=TYPES[x.dtype],
            scale_type=TYPES[scales.dtype],
            activations=activations,
            clip=1.0,
            packed=pointer(packed),
            scales=pointer(scales),
            zero_points=pointer(zeros),
            bias=pointer(bias),
            codec=codec,
        )
        return call, y, [x, packed, scales, zeros, bias]

    def run(self, name: str, call: MatMul | MatMulDynamic, product: MatMul, seed: int) -> None:
        function = f"graphopt_cuda_matmul_{name}"
        scratch = filled((getattr(self.library, f"{function}_scratch")(ctypes.byref(call)),), np.uint8)
        product.scratch = pointer(scratch)
        self.library.graphopt_interpreter_seed(seed)
        check(getattr(self.library, function)(ctypes.byref(call), None))
