"""A tensor of a GGUF file as an expression: bytes of the file, decoded exactly as llama.cpp defines them."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import MissingDependencyError
from graphopt.graph.weights import Array, Expression, Region, Shape

PLAIN = {"F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16}
"""Types that store numbers one by one, and not as blocks of codes."""


def import_gguf() -> Any:
    """Return the module ``gguf``.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise MissingDependencyError(
            f"reading a GGUF file needs the package gguf ({error})", remedy='pip install "graphopt[export]"'
        ) from error


@dataclasses.dataclass(frozen=True, eq=False)
class Ggml(Expression):
    """A tensor of a GGUF file, decoded to float32.

    A row is a run of blocks; a block holds a fixed count of numbers in a fixed count of bytes. Decoding is that of the
    ``gguf`` package, in float32, and each number depends on its own block alone.

    Attributes:
        path: the file.
        offset: where the tensor begins, in bytes.
        kind: the name of its type in GGML, such as Q4_1.
        dims: its dimensions, the last one along rows.
    """

    path: str
    offset: int
    kind: str
    dims: Shape

    @property
    def dtype(self) -> ir.DataType:
        """float32."""
        return ir.DataType.FLOAT

    @property
    def shape(self) -> Shape:
        """The dimensions."""
        return self.dims

    @property
    def whole(self) -> frozenset[int]:
        """No axis: any block can be read by itself."""
        return frozenset()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of type, dimensions and stored bytes, wherever the file lies."""
        digest = hashlib.sha256(f"ggml {self.kind} {list(self.dims)}".encode())
        digest.update(self.stored_bytes().reshape(-1).data)
        return digest.hexdigest()

    def stored_bytes(self) -> Array:
        """Map the stored bytes, uint8 [..., bytes of a row], read-only."""
        block, size = block_of(self.kind)
        rows = (*self.dims[:-1], self.dims[-1] // block * size)
        return np.memmap(self.path, np.uint8, "r", self.offset, rows)

    def blocks(self) -> Array:
        """Map the stored blocks, uint8 [..., blocks of a row, bytes of a block], read-only."""
        rows = self.stored_bytes()
        return rows.reshape(*rows.shape[:-1], -1, block_of(self.kind)[1])

    def evaluate(self, region: Region) -> Array:
        """Decode the blocks that the region touches."""
        block, _ = block_of(self.kind)
        *rows, columns = region
        first, last = columns.start // block, -(-columns.stop // block)
        blocks = np.ascontiguousarray(self.blocks()[(*rows, slice(first, last))])
        numbers = decode(blocks, self.kind).reshape(*blocks.shape[:-2], (last - first) * block)
        return numbers[..., columns.start - first * block : columns.stop - first * block]

    def __str__(self) -> str:
        return f"ggml({Path(self.path).name}, {self.offset}, {self.kind}{list(self.dims)})"


@cache
def block_of(kind: str) -> tuple[int, int]:
    """Return how many numbers a block of this type holds, and in how many bytes."""
    gguf = import_gguf()
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(numbers), int(size)


@cache
def is_decodable(kind: str) -> bool:
    """Return whether the ``gguf`` package can decode blocks of this type."""
    try:
        decode(np.zeros((1, block_of(kind)[1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def decode(blocks: Array, kind: str) -> Array:
    """Decode blocks, uint8 [..., bytes of a block], into float32 [..., numbers of a block].

    Raises:
        NotImplementedError: the ``gguf`` package cannot decode this type.
    """
    gguf = import_gguf()
    numbers = block_of(kind)[0]
    if not blocks.size:
        return np.zeros((*blocks.shape[:-1], numbers), np.float32)
    flat = blocks.reshape(1, -1)  # one row: gguf decodes 16 rows at a time, in Python
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are refused later, with the tensor's name
        values = gguf.dequantize(flat, gguf.GGMLQuantizationType[kind])
    return np.asarray(values, np.float32).reshape(*blocks.shape[:-1], numbers)
