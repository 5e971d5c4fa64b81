"""A weight as an expression: plain data that can be printed, hashed, pickled, and evaluated wherever it is sent.

    float32(rotated(float64(stored(model.onnx.data, 4096)), axis=0, ...))

To add a kind of expression, derive one frozen dataclass from :class:`Expression` with ``dtype``, ``shape`` and
``evaluate``; its fields may be expressions, numbers, strings, arrays, and frozen dataclasses of these. Children,
digest, printing and replacing follow from the fields. What yields several tensors at once derives from
:class:`Bundle`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

Region = tuple[slice, ...]
"""A box of a tensor: for each axis a slice with a start, a stop and no step."""

# Numbers in a block; in float64 it and a few temporaries stay near the processor's last cache.
_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """What expressions and groups of them have in common. Equality is identity; compare contents by :attr:`digest`."""

    @property
    def children(self) -> tuple[Node, ...]:
        """The expressions that this one is made of: those among its fields."""
        return tuple(_nodes_in([getattr(self, field.name) for field in dataclasses.fields(self)]))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the kind of expression, its fields and the digests of its children, in hexadecimal.

        Two expressions with the same digest evaluate to the same bytes, on any machine. Reading the digest may read
        the leaves.
        """
        fields = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return hashlib.sha256(_encode((type(self).__name__, fields))).hexdigest()

    def replacing(self, replacements: Mapping[Node, Node]) -> Self:
        """Return this expression with each node that is a key of ``replacements``, below it, replaced by its value."""
        copy: Self = _replace_nodes(self, replacements, {})
        return copy

    def __str__(self) -> str:
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        texts = [_text(value) if isinstance(value, Node) else f"{name}={_text(value)}" for name, value in fields]
        return f"{type(self).__name__.lower()}({', '.join(texts)})"


@dataclasses.dataclass(frozen=True, eq=False)
class Expression(Node, ABC):
    """One tensor."""

    @property
    @abstractmethod
    def dtype(self) -> ir.DataType:
        """The type of its numbers."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """Its dimensions."""

    @property
    def whole(self) -> frozenset[int]:
        """The axes along which a part costs as much as the whole. By default all of them."""
        return frozenset(range(len(self.shape)))

    @abstractmethod
    def evaluate(self, region: Region) -> Array:
        """Return the numbers in ``region``: an array that belongs to the caller alone, or one that is read-only.

        A number must have the same bits whatever the region is that it is asked for in.
        """

    def numpy(self) -> Array:
        """Return all numbers, evaluated in blocks where :attr:`whole` allows it; perhaps read-only.

        Raises:
            ValueError: an expression evaluated to another shape than it promised.
        """
        regions = list(blocks(self.shape, self.whole))
        if len(regions) == 1:
            return self._evaluate_checked(regions[0])
        array = np.empty(self.shape, self.dtype.numpy())
        for region in regions:
            array[region] = self._evaluate_checked(region)
        return array

    def _evaluate_checked(self, region: Region) -> Array:
        array = self.evaluate(region)
        shape = tuple(piece.stop - piece.start for piece in region)
        if array.shape != shape:
            raise ValueError(f"a part of {self} came out as {array.shape}, promised as {shape}")
        return np.asarray(array, self.dtype.numpy())

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in a file."""
        return -(-math.prod(self.shape) * self.dtype.bitwidth // 8)


@dataclasses.dataclass(frozen=True, eq=False)
class Origin(Expression):
    """Numbers that were made of fewer bytes: what is stored of them remembers it, so that it can be stored so again."""


@dataclasses.dataclass(frozen=True, eq=False)
class Bundle(Node, ABC):
    """Several tensors that are computed together, such as codes and scales. Each is taken out by :class:`Part`."""

    @property
    @abstractmethod
    def parts(self) -> dict[str, tuple[ir.DataType, Shape]]:
        """Type and shape of each tensor, by name."""

    @abstractmethod
    def evaluate(self) -> dict[str, Array]:
        """Return the tensors by name."""


@dataclasses.dataclass(frozen=True, eq=False)
class Part(Expression):
    """One of several tensors that are computed together."""

    source: Bundle
    name: str

    @property
    def dtype(self) -> ir.DataType:
        """As the group says."""
        return self.source.parts[self.name][0]

    @property
    def shape(self) -> Shape:
        """As the group says."""
        return self.source.parts[self.name][1]

    def evaluate(self, region: Region) -> Array:
        """Evaluate the whole group; whoever needs several parts evaluates the group and replaces the parts."""
        return self.source.evaluate()[self.name][region]


def whole_region(shape: Shape) -> Region:
    """Return the region that is all of a tensor."""
    return tuple(slice(0, size) for size in shape)


def widen(region: Region, axis: int, size: int) -> Region:
    """Return ``region`` with all of ``axis``, which has ``size`` coordinates."""
    return (*region[:axis], slice(0, size), *region[axis + 1 :])


def blocks(shape: Shape, whole: Iterable[int]) -> Iterator[Region]:
    """Yield regions of about 2^20 numbers that cover a tensor: it is cut along its largest axis that is not whole."""
    whole_axes = set(whole)
    candidates = [axis for axis in range(len(shape)) if axis not in whole_axes]
    if not candidates or not math.prod(shape):
        yield whole_region(shape)
        return
    cut = max(candidates, key=lambda axis: shape[axis])
    step = max(1, _BLOCK * shape[cut] // math.prod(shape))
    for start in range(0, shape[cut], step):
        piece = slice(start, min(start + step, shape[cut]))
        yield (*whole_region(shape[:cut]), piece, *whole_region(shape[cut + 1 :]))


def blocks_of(shape: Shape, axis: int) -> Iterator[Region]:
    """Yield regions of about 2^20 numbers that each hold all of ``axis``."""
    return blocks(shape, (axis % len(shape),))


def nodes_below(root: Node) -> Iterator[Node]:
    """Yield each node of an expression once, children before what is made of them."""
    known_nodes: set[Node] = set()

    def walk(node: Node) -> Iterator[Node]:
        if node not in known_nodes:
            known_nodes.add(node)
            for child in node.children:
                yield from walk(child)
            yield node

    return walk(root)


def _nodes_in(value: object) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _nodes_in(element)


def _replace_nodes(value: Any, replacements: Mapping[Node, Node], copies: dict[Node, Node]) -> Any:
    if isinstance(value, tuple):
        return tuple(_replace_nodes(element, replacements, copies) for element in value)
    if not isinstance(value, Node):
        return value
    if value in replacements:
        return replacements[value]
    if value not in copies:
        old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        new = {name: _replace_nodes(field, replacements, copies) for name, field in old.items()}
        is_same = all(_is_same(old[name], new[name]) for name in old)
        copies[value] = value if is_same else dataclasses.replace(value, **new)
    return copies[value]


def _is_same(old: object, new: object) -> bool:
    if isinstance(old, tuple) and isinstance(new, tuple):
        return all(_is_same(a, b) for a, b in zip(old, new, strict=True))
    return old is new


def _encode(value: object) -> bytes:
    """Return bytes that differ where values differ: each part with its kind and its length."""
    if isinstance(value, Node):
        kind, content = "node", value.digest.encode()
    elif isinstance(value, np.ndarray):
        body = np.ascontiguousarray(value)
        kind, content = f"array {body.dtype.str} {body.dtype.name} {body.shape}", body.tobytes()
    elif isinstance(value, (list, tuple)):
        kind, content = "sequence", b"".join(_encode(element) for element in value)
    elif isinstance(value, BaseModel):
        kind, content = type(value).__name__, value.model_dump_json().encode()
    elif isinstance(value, ir.DataType):
        kind, content = "type", value.name.encode()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        kind, content = type(value).__name__, _encode(fields)
    elif value is None or isinstance(value, (bool, int, float, str)):
        kind, content = type(value).__name__, repr(value).encode()
    else:
        raise TypeError(f"a field of an expression cannot be {type(value).__name__}: it has no content to hash")
    return f"{kind}:{len(content)}:".encode() + content


def _text(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype.name}{list(value.shape)}"
    if isinstance(value, ir.DataType):
        return value.name.lower()
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Node)) and hasattr(value, "name"):
        return str(value.name)
    return str(value)
