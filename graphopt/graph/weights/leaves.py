"""Where expressions begin: bytes in a file, an array in memory."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import sys
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights.expression import Array, Expression, Node, Origin, Region, Shape, nodes_below


class MappedTensor(ir.ExternalTensor):
    """A tensor on disk that is mapped into memory for as long as its array is used, and no longer.

    ``onnx_ir`` keeps each file mapped once a tensor was read: reading all weights of a model one by one then ends with
    the whole model in resident memory.

    Attributes:
        expression: the expression that the tensor was made from, if it was.
    """

    expression: StoredBytes | None = None

    def numpy(self) -> Array:
        """Return the array, read-only; the mapping ends when the array does."""
        # onnx_ir keeps the mapping in the tensor: a copy has its own, so threads may read one tensor side by side
        return super(MappedTensor, copy.copy(self)).numpy()

    def tobytes(self) -> bytes:
        """Return a copy of the stored bytes."""
        if not self.nbytes:  # which no file maps
            return b""
        return super(MappedTensor, copy.copy(self)).tobytes()

    def __array__(self, dtype: Any = None) -> Array:
        return self.numpy().__array__(dtype)


class _Leaf(Expression):
    """A tensor that is not computed; cutting it is free."""

    @property
    def whole(self) -> frozenset[int]:
        """No axis: any part can be read by itself."""
        return frozenset()

    def numpy(self) -> Array:
        """Return all numbers, read-only: nothing is copied."""
        return self.evaluate(tuple(slice(0, size) for size in self.shape))


@dataclasses.dataclass(frozen=True, eq=False)
class StoredBytes(_Leaf):
    """Bytes of a file.

    Attributes:
        path: the file.
        offset: where the tensor begins, in bytes.
        kind: the type of its numbers.
        dims: its dimensions.
        known_digest: the digest of the expression whose value the file holds, where it is known. Without it the digest
            is that of the stored bytes, which is the same as of an :class:`Inline` array of these.
        origins: what its expression had below it of the kind, in order, where the file holds the value of one.
    """

    path: str
    offset: int
    kind: ir.DataType
    dims: Shape
    known_digest: str | None = None
    origins: tuple[Origin, ...] = ()

    @property
    def children(self) -> tuple[Node, ...]:
        """None: it is read, whatever it was made of."""
        return ()

    @property
    def dtype(self) -> ir.DataType:
        """The stored type."""
        return self.kind

    @property
    def shape(self) -> Shape:
        """The stored dimensions."""
        return self.dims

    @cached_property
    def digest(self) -> str:
        """SHA-256 of type, dimensions and bytes, unless the file's expression is known."""
        return self.known_digest or digest_of_array(self.numpy(), self.kind)

    def tensor(self, name: str | None = None) -> MappedTensor:
        """Return the tensor as the ONNX IR has it; it remembers this expression."""
        file, dims = Path(self.path), ir.Shape(self.dims)
        tensor = MappedTensor(
            file.name, self.offset, self.nbytes, self.kind, shape=dims, name=name or "", base_dir=file.parent
        )
        tensor.expression = self
        return tensor

    def evaluate(self, region: Region) -> Array:
        """Map the file and return a read-only view of it."""
        # Without a folder, onnx_ir does not look again where the path leads: that is done when a model is opened.
        tensor = MappedTensor(
            self.path, self.offset, self.nbytes, self.kind, shape=ir.Shape(self.dims), name="", base_dir=""
        )
        return _cut(tensor.numpy(), region)

    def __str__(self) -> str:
        return f"stored({Path(self.path).name}, {self.offset}, {self.kind.name.lower()}{list(self.dims)})"


@dataclasses.dataclass(frozen=True, eq=False)
class Inline(_Leaf):
    """An array in memory, which travels with the expression. It must not be changed afterwards.

    Attributes:
        array: the numbers.
        kind: their ONNX type; several are stored in one NumPy type.
    """

    array: Array
    kind: ir.DataType

    @classmethod
    def from_array(cls, array: Array) -> Inline:
        """Return the expression of an array whose NumPy type names its ONNX type."""
        return cls(array, ir.DataType.from_numpy(array.dtype))

    @property
    def dtype(self) -> ir.DataType:
        """The type of the array."""
        return self.kind

    @property
    def shape(self) -> Shape:
        """The dimensions of the array."""
        return self.array.shape

    @cached_property
    def digest(self) -> str:
        """SHA-256 of type, dimensions and bytes."""
        return digest_of_array(self.array, self.kind)

    def evaluate(self, region: Region) -> Array:
        """Return a read-only view."""
        view = _cut(self.array, region)
        view.flags.writeable = False
        return view


def write_array(array: Array, dtype: ir.DataType, stream: BinaryIO) -> None:
    """Write a tensor as a model file holds it: in row-major order, little-endian, codes below 8 bits packed."""
    if dtype.bitwidth >= 8 and sys.byteorder == "little":
        stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    else:
        stream.write(ir.Tensor(np.ascontiguousarray(array), dtype=dtype).tobytes())


def origins_of(expression: Expression) -> tuple[Origin, ...]:
    """Return the origins of numbers that an expression is made of, in the order of its fields, each once."""
    origins: dict[Origin, None] = {}
    for node in nodes_below(expression):
        nodes = node.origins if isinstance(node, StoredBytes) else (node,)
        origins |= dict.fromkeys(origin for origin in nodes if isinstance(origin, Origin))
    return tuple(origins)


def _cut(array: Array, region: Region) -> Array:
    # The indexing of an array without axes gives a number, not an array.
    return array[region] if region else array.view()


def digest_of_array(array: Array, dtype: ir.DataType) -> str:
    """Return the digest of a tensor whose numbers are known: SHA-256 of its type, dimensions and bytes."""
    digest = hashlib.sha256(f"tensor {dtype.name} {list(array.shape)}".encode())
    if array.size:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
