"""MatMulTable and MatMulDynamic through the C interface of ``matmul_table/cuda/interface.h``."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np

from graphopt.runtime_ops.matmul_dynamic.spec.op import LEVELS
from graphopt.runtime_ops.matmul_table.spec.activations import MODES
from tests.runtime_ops.cuda.interface import TYPES, Buffer, Factor, aligned, check, factor

Case = dict[str, Any]
OPERANDS = ("float32", "float16", "bfloat16", "int8")
DECODERS = ("table", "wide", "table4", "int4", "int8", "e3m2", "e2m3", "trellis2", "trellis3", "trellis4")


class Codec(ctypes.Structure):
    """GraphoptMatMulCodec."""

    _fields_ = [
        *((name, c_int32) for name in ("operands", "decoder", "order", "bits")),
        ("flips", c_uint32),
        ("offset", c_int32),
        ("step", c_float),
        ("largest", c_float),
        ("lookup", c_uint32 * 8),
    ]


class Weights(ctypes.Structure):
    """GraphoptMatMulWeights."""

    _fields_ = [
        ("rows", c_uint64),
        ("columns", c_uint64),
        *((name, c_int32) for name in ("bits", "entries", "trellis")),
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
        ("largest_scale", c_float),
        ("codec", Codec),
        ("scratch", c_void_p),
    ]


class MatMulDynamic(ctypes.Structure):
    """GraphoptMatMulDynamic."""

    _fields_ = [("product", MatMul), ("left", Factor), ("right", Factor)]


TO_TOKEN = 4


def pointer(buffer: Buffer | None) -> int | None:
    return None if buffer is None else buffer.pointer


class Products:
    """A library's products, of arrays: whose kernels the host interpreter runs, or a GPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for name in ("codec", "table_scratch", "dynamic_scratch"):
            getattr(library, f"graphopt_cuda_matmul_{name}").restype = c_size_t
        library.graphopt_cuda_matmul_operands.restype = c_int32
        library.graphopt_cuda_matmul_pack.restype = c_int32

    def pack(self, case: Case, operands: str) -> tuple[Codec, np.ndarray]:
        """Return the codec and the packed codes with their table."""
        codes, table = (np.ascontiguousarray(case[name]) for name in ("codes", "table"))
        bits = codes.shape[2] // 32
        sizes = case["rows"], case["columns"], bits, table.shape[-1], case.get("trellis", 0)
        weights = Weights(*sizes, codes.ctypes.data, table.ctypes.data)
        codec, place = Codec(), ctypes.byref
        size = self.library.graphopt_cuda_matmul_codec(place(weights), OPERANDS.index(operands), place(codec))
        packed = aligned(np.empty(size, np.uint8))
        self.library.graphopt_cuda_matmul_pack(place(weights), place(codec), c_void_p(packed.ctypes.data))
        return codec, packed

    def operands(self, dtype: Any, activations: int) -> str:
        return OPERANDS[self.library.graphopt_cuda_matmul_operands(TYPES[np.dtype(dtype)], activations)]

    def table(self, case: Case, seed: int = 0, shift: int = 0, *, sm90a: bool = False) -> np.ndarray:
        """Return MatMulTable's y [..., N] of x's own type.

        ``seed`` draws the order of the interpreter's threads; x lies ``shift`` numbers behind a multiple of 256 bytes.
        With ``sm90a`` the interpreter runs kernels that only sm_90a has; a GPU chooses by itself.
        """
        call, y, kept = self.call(case, MODES.index(case["activations"]), shift)
        scratch = self.run("table", call, call, seed, sm90a=sm90a)
        result = y.numpy()
        del kept, scratch
        return result

    def dynamic(self, case: Case, seed: int = 0) -> np.ndarray:
        """Return MatMulDynamic's y [..., N], likewise."""
        product, y, kept = self.call(case, TO_TOKEN)
        product.levels, product.clip = LEVELS[case["bits"]], case["clip"]
        factors, signs = zip(*(factor(self.library, case[side]) for side in ("left", "right")), strict=True)
        call = MatMulDynamic(product, *factors)
        scratch = self.run("dynamic", call, call.product, seed)
        result = y.numpy()
        del kept, scratch, signs
        return result

    def call(self, case: Case, activations: int, shift: int = 0) -> tuple[MatMul, Buffer, list[Any]]:
        """Return a call without scratch, its y, and the memory that it points to."""
        given = case["x"]
        codec, packed_codes = self.pack(case, self.operands(given.dtype, activations))
        x = Buffer(self.library, given, shift=shift)
        packed, scales = (Buffer(self.library, array) for array in (packed_codes, case["scales"]))
        y = Buffer(self.library, np.full((*given.shape[:-1], case["columns"]), np.nan, given.dtype))
        zeros = Buffer(self.library, case["zero_points"]) if case["zero_points"].any() else None
        bias = Buffer(self.library, case["bias"]) if len(case["bias"]) == case["columns"] else None
        call = MatMul(
            x=pointer(x),
            y=pointer(y),
            m=int(np.prod(given.shape[:-1])),
            rows=case["rows"],
            columns=case["columns"],
            group=case["group"],
            x_type=TYPES[given.dtype],
            scale_type=TYPES[case["scales"].dtype],
            activations=activations,
            clip=1.0,
            packed=pointer(packed),
            scales=pointer(scales),
            zero_points=pointer(zeros),
            bias=pointer(bias),
            largest_scale=float(np.abs(case["scales"]).max()),
            codec=codec,
        )
        return call, y, [x, packed, scales, zeros, bias]

    def run(
        self, name: str, call: MatMul | MatMulDynamic, product: MatMul, seed: int, *, sm90a: bool = False
    ) -> Buffer:
        function = f"graphopt_cuda_matmul_{name}"
        if not self.library.on_gpu:
            self.library.graphopt_interpreter_sm90a(sm90a)  # scratch depends on which kernel it is
        size = getattr(self.library, f"{function}_scratch")(ctypes.byref(call))
        scratch = Buffer(self.library, np.full(size, 0xFF, np.uint8))
        product.scratch = scratch.pointer
        if not self.library.on_gpu:
            self.library.graphopt_interpreter_seed(seed)
        check(getattr(self.library, function)(ctypes.byref(call), None))
        return scratch
