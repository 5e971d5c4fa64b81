"""What tensors hold, compared as far as it takes: a sample to find partners by, all numbers to be sure.

A sample is a few blocks of the stored bytes. So a model of many gigabytes is matched without reading its weights, and
only tensors that became partners are read, in blocks.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights import Array, expression_of, source_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

_BLOCK, _SAMPLES = 256, 16
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Difference:
    """How far two tensors of one type and shape are apart.

    Attributes:
        changed: share of their numbers that differ.
        relative: root of the mean squared difference over that of the first; ``None`` where they are no floats.
        largest: largest difference, likewise over the largest number of the first.
    """

    changed: float
    relative: float | None = None
    largest: float | None = None


def sample(tensor: ir.TensorProtocol | None) -> Hashable:
    """Return type, shape and a checksum of a few blocks of a tensor: equal for equal tensors."""
    if tensor is None:
        return None
    return tensor.dtype, tuple(tensor.shape.numpy()), _checksum(tensor)


def _checksum(tensor: ir.TensorProtocol) -> int:
    if isinstance(tensor, ir.StringTensor):
        return zlib.crc32(b"\0".join(tensor.string_data()))
    size = tensor.nbytes
    last = max(0, size - _BLOCK)
    offsets = sorted({last * number // (_SAMPLES - 1) for number in range(_SAMPLES)})
    if isinstance(tensor, ir.ExternalTensor):
        with Path(tensor.path).open("rb") as stream:
            checksum = 0
            for offset in offsets:
                stream.seek((tensor.offset or 0) + offset)
                checksum = zlib.crc32(stream.read(min(_BLOCK, size)), checksum)
            return checksum
    content, checksum = tensor.tobytes(), 0
    for offset in offsets:
        checksum = zlib.crc32(content[offset : offset + _BLOCK], checksum)
    return checksum


def difference(before: ir.TensorProtocol, after: ir.TensorProtocol) -> Difference | None:
    """Compare two tensors of one type and shape, number by number; ``None`` where they are the same."""
    if source_of(before) == source_of(after):
        return None
    if isinstance(before, ir.StringTensor) or isinstance(after, ir.StringTensor):
        pairs = list(zip(before.numpy().reshape(-1), after.numpy().reshape(-1), strict=True))
        count = sum(a != b for a, b in pairs)
        return Difference(count / len(pairs)) if count else None
    a, b = (np.asarray(expression_of(tensor).numpy()).reshape(-1) for tensor in (before, after))
    is_floating = before.dtype.is_floating_point()
    totals = _Totals()
    for part in _chunks(a.size):
        totals.add(a[part], b[part], is_floating)
    if not totals.count:
        return None
    share = totals.count / a.size
    if not is_floating:
        return Difference(share)
    return Difference(share, _share(totals.error, totals.power) ** 0.5, _share(totals.largest, totals.top))


@dataclass
class _Totals:
    """Sums over the parts of two tensors.

    Attributes:
        count: numbers that differ.
        error: sum of squared differences.
        power: sum of squares of the first tensor.
        largest: largest difference.
        top: largest number of the first tensor.
    """

    count: int = 0
    error: float = 0.0
    power: float = 0.0
    largest: float = 0.0
    top: float = 0.0

    def add(self, a: Array, b: Array, is_floating: bool) -> None:
        """Add a part of both tensors."""
        unequal = a.view(np.uint8) != b.view(np.uint8)
        differs = bool(unequal.any())
        if differs:
            self.count += int(unequal.reshape(len(a), -1).any(-1).sum())
        if not is_floating:
            return
        wide = a.astype(np.float64)
        self.power += float(wide @ wide)
        self.top = max(self.top, float(np.abs(wide).max(initial=0)))
        if differs:
            gap = b.astype(np.float64) - wide
            self.error += float(gap @ gap)
            self.largest = max(self.largest, float(np.abs(gap).max(initial=0)))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else float("inf") if part else 0.0


def _chunks(size: int) -> Iterator[slice]:
    return (slice(begin, begin + _CHUNK) for begin in range(0, size, _CHUNK))
