"""llama.cpp's products, through a ggml that the user built; ``ggml_matmul.c`` calls it."""

from __future__ import annotations

import ctypes
import functools
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from tools.bench.parts.engine import TOLERANCES, Engine, Workload
from tools.bench.parts.machine import compile_c
from tools.bench.parts.problem import Array, Problem
from tools.bench.parts.unavailable import UnavailableError

_TYPES = {
    "q4_0": "q4_0",
    "q4_k": "q4_K",
    "q6_k": "q6_K",
    "q8_0": "q8_0",
    "iq2_xs": "iq2_xs",
    "iq3_xxs": "iq3_xxs",
}
_LIBRARIES = ("ggml", "ggml-cpu", "ggml-base")


def engines() -> list[Engine]:
    """Return each type twice: in llama.cpp's layout for this machine, and in that of the file."""
    return [
        Engine(
            f"llama.cpp-{name}{suffix}", TOLERANCES["int8"], partial(_prepare, type_name=type_name, plain=bool(suffix))
        )
        for name, type_name in _TYPES.items()
        for suffix in ("", "-plain")
    ]


def open_driver(source: str, build: Path | None, work: Path) -> ctypes.CDLL:
    """Compile a file of C beside this one against the user's ggml, and load it.

    Raises:
        UnavailableError: there is no build of ggml, or the file does not compile with it.
    """
    if build is None:
        raise UnavailableError("no build of llama.cpp is named: --ggml FOLDER, or GRAPHOPT_BENCH_GGML")
    cache, libraries = build / "CMakeCache.txt", build / "bin"
    if not cache.is_file() or not list(libraries.glob("libggml-cpu.*")):
        raise UnavailableError(f"{build} is no build folder of llama.cpp with shared libraries in bin/")
    (home,) = (
        line.split("=", 1)[1] for line in cache.read_text().splitlines() if line.startswith("CMAKE_HOME_DIRECTORY")
    )
    options = [f"-I{home}/ggml/include", f"-I{home}/include", f"-L{libraries}", f"-Wl,-rpath,{libraries.resolve()}"]
    options += [f"-l{library}" for library in _LIBRARIES]
    return ctypes.CDLL(str(compile_c(Path(__file__).with_name(source), work, options)))


@lru_cache(maxsize=1)
def _driver(build: Path | None, work: Path) -> ctypes.CDLL:
    driver = open_driver("ggml_matmul.c", build, work)
    i64, pointer, name = ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p
    driver.matmul_bytes.restype, driver.matmul_bytes.argtypes = ctypes.c_size_t, [name, i64, i64]
    for function in (driver.matmul_quantize, driver.matmul_dequantize):
        function.restype, function.argtypes = None, [name, i64, i64, pointer, pointer]
    integer = ctypes.c_int
    driver.matmul_new.restype = pointer
    driver.matmul_new.argtypes = [name, i64, i64, i64, integer, integer, integer]
    driver.matmul_where.restype, driver.matmul_where.argtypes = name, [pointer]
    driver.matmul_set.restype, driver.matmul_set.argtypes = None, [pointer, integer, pointer, pointer]
    driver.matmul_run.argtypes = [pointer]
    driver.matmul_get.restype, driver.matmul_get.argtypes = None, [pointer, integer, pointer]
    driver.matmul_free.restype, driver.matmul_free.argtypes = None, [pointer]
    return driver


class _Graph:
    """A graph of the driver, freed with this object."""

    def __init__(self, driver: ctypes.CDLL, problem: Problem, type_name: bytes, copies: int, plain: bool) -> None:
        case = problem.case
        self.driver, self.shape, self.copies = driver, (case.rows, case.outer), copies
        self.address = driver.matmul_new(
            type_name, case.inner, case.outer, case.rows, copies, problem.settings.memory.threads, plain
        )
        if not self.address:
            raise UnavailableError("ggml finds no memory")

    def run(self) -> None:
        if self.driver.matmul_run(self.address) != 0:
            raise RuntimeError("ggml cannot compute its graph")

    def outputs(self) -> list[Array]:
        arrays = [np.empty(self.shape, np.float32) for _ in range(self.copies)]
        for copy, y in enumerate(arrays):
            self.driver.matmul_get(self.address, copy, y.ctypes.data)
        return arrays

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self.driver.matmul_free(self.address)


def _prepare(problem: Problem, type_name: str, plain: bool) -> Workload:
    case = problem.case
    driver = _driver(problem.settings.ggml, problem.settings.work)
    name, sizes = type_name.encode(), (case.inner, case.outer)
    size = int(driver.matmul_bytes(name, *sizes))
    if not size:
        raise UnavailableError(f"ggml has no {type_name} for {case.inner} columns")
    codes, floats = problem.weights.keep(("ggml", type_name), functools.partial(_quantize, driver, name, problem, size))
    graph = _Graph(driver, problem, name, problem.copies(size), plain)
    if not plain and driver.matmul_where(graph.address) == b"CPU":
        raise UnavailableError(
            f"ggml repacks no {type_name} on this processor: see llama.cpp-{type_name.lower()}-plain"
        )
    for copy in range(graph.copies):
        weights = problem.shuffle(codes, copy)
        driver.matmul_set(graph.address, copy, weights.ctypes.data, problem.x.ctypes.data)
    reference = problem.x.astype(np.float64) @ floats.T.astype(np.float64)
    return Workload(graph.run, graph.outputs, reference, size + problem.bytes_of_activations)


def _quantize(driver: ctypes.CDLL, name: bytes, problem: Problem, size: int) -> tuple[Array, Array]:
    """Return the weights as ggml stores them, uint8 [outer, bytes], and as it reads them, float32 [outer, inner]."""
    values = problem.weights.values
    codes, floats = np.empty((len(values), size // len(values)), np.uint8), np.empty_like(values)
    sizes = (problem.case.inner, problem.case.outer)
    driver.matmul_quantize(name, *sizes, values.ctypes.data, codes.ctypes.data)
    driver.matmul_dequantize(name, *sizes, codes.ctypes.data, floats.ctypes.data)
    return codes, floats
