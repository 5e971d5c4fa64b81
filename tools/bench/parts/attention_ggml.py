"""llama.cpp's attention, ``ggml_flash_attn_ext``, through a ggml that the user built; ``ggml_attention.c`` calls it.

It is measured only if it is named: a step takes ten times as long here as in llama.cpp itself, for a reason that is not
known, so a comparison with it says nothing.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tools.bench.parts.attention_problem import AttentionProblem
from tools.bench.parts.attention_reference import attend_flat
from tools.bench.parts.engine import AnyEngine, Workload
from tools.bench.parts.ggml_engines import open_driver
from tools.bench.parts.problem import Array
from tools.bench.parts.unavailable import UnavailableError

# By the norm of y. Sums over float16 values are float16; for the others ggml rounds queries to int8 in blocks of 32,
# which moves scores by a hundredth or two, and with them each probability by as much of itself.
_TOLERANCES = {"f16": 3e-2, "q8_0": 6e-2, "q4_0": 6e-2}

_TOKENS = 4096
"""Tokens that are quantized at a time."""


def engines() -> list[AnyEngine[AttentionProblem]]:
    """Return the types of llama.cpp's caches to measure."""
    return [
        AnyEngine(f"llama.cpp-{name}", tolerance, partial(_prepare, type_name=name), kind="attention", default=False)
        for name, tolerance in _TOLERANCES.items()
    ]


@lru_cache(maxsize=1)
def _driver(build: Path | None, work: Path) -> ctypes.CDLL:
    driver = open_driver("ggml_attention.c", build, work)
    i64, pointer, name, integer = ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    driver.attention_bytes.restype, driver.attention_bytes.argtypes = ctypes.c_size_t, [name, i64]
    driver.attention_new.restype = pointer
    driver.attention_new.argtypes = [name, i64, i64, i64, i64, i64, integer, integer]
    driver.attention_run.argtypes = [pointer]
    without_result = {
        "quantize": [name, i64, i64, pointer, pointer],
        "dequantize": [name, i64, pointer, pointer],
        "ask": [pointer, pointer, pointer, pointer],
        "fill": [pointer, integer, pointer, pointer],
        "get": [pointer, integer, pointer],
        "free": [pointer],
    }
    for suffix, types in without_result.items():
        function = getattr(driver, f"attention_{suffix}")
        function.restype, function.argtypes = None, types
    return driver


class _Graph:
    """A graph of the driver, freed with this object."""

    def __init__(self, driver: ctypes.CDLL, problem: AttentionProblem, type_name: bytes, copies: int) -> None:
        case = problem.case
        self.driver, self.shape, self.copies = driver, (case.tokens, case.heads, case.size), copies
        sizes = (case.size, case.heads, case.kv_heads, case.context, case.tokens)
        self.address = driver.attention_new(type_name, *sizes, copies, problem.settings.memory.threads)
        if not self.address:
            raise UnavailableError("ggml finds no memory")
        tensors = [problem.query, *(np.ascontiguousarray(array[0].swapaxes(0, 1)) for array in problem.new)]
        driver.attention_ask(self.address, *(array.ctypes.data for array in tensors))

    def run(self) -> None:
        if self.driver.attention_run(self.address) != 0:
            raise RuntimeError("ggml cannot compute its graph")

    def outputs(self) -> list[Array]:
        arrays = [np.empty(self.shape, np.float32) for _ in range(self.copies)]
        for copy, y in enumerate(arrays):
            self.driver.attention_get(self.address, copy, y.ctypes.data)
        return arrays

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self.driver.attention_free(self.address)


def _prepare(problem: AttentionProblem, type_name: str) -> Workload:
    case = problem.case
    driver, name = _driver(problem.settings.ggml, problem.settings.work), type_name.encode()
    if not driver.attention_bytes(name, case.size):
        raise UnavailableError(f"ggml has no {type_name} for heads of {case.size}")
    cache = [_quantize(driver, name, array[0]) for array in problem.cache]
    size = sum(array.nbytes for array in cache)
    graph = _Graph(driver, problem, name, problem.copies(size))
    for copy in range(graph.copies):
        driver.attention_fill(graph.address, copy, *(array.ctypes.data for array in cache))

    def read_tokens(head: int, part: slice) -> tuple[Array, Array]:
        rows = [np.ascontiguousarray(array[part, head]) for array in cache]
        keys, values = np.empty((2, len(rows[0]), case.size), np.float32)
        for codes, floats in zip(rows, (keys, values), strict=True):
            driver.attention_dequantize(name, floats.size, codes.ctypes.data, floats.ctypes.data)
        return keys, values

    reference = attend_flat(problem.query, problem.scale, case.context, read_tokens, case.kv_heads)
    return Workload(graph.run, graph.outputs, reference, size + problem.bytes_of_activations)


def _quantize(driver: ctypes.CDLL, name: bytes, array: Array) -> npt.NDArray[np.uint8]:
    """Return keys or values [Hk, n, D] as ggml stores them, [n, Hk, bytes of a head]."""
    heads, tokens, size = array.shape
    codes = np.empty((tokens, heads, driver.attention_bytes(name, size)), np.uint8)
    for first in range(0, tokens, _TOKENS):
        rows = np.ascontiguousarray(array[:, first : first + _TOKENS].swapaxes(0, 1))
        target = codes[first : first + _TOKENS]
        driver.attention_quantize(name, size, rows.size, rows.ctypes.data, target.ctypes.data)
    return codes
