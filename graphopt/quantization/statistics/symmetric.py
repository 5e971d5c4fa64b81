"""A symmetric matrix in a file: each panel of rows from its diagonal on, so half of the numbers."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphopt.graph.weights import Array, Expression, Region, Shape, StoredBytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

PANEL = 512
"""Rows of a panel."""


def panels(rows: int) -> Iterator[slice]:
    """Yield the rows of each panel; it holds the columns from its first row on."""
    return (slice(start, min(start + PANEL, rows)) for start in range(0, rows, PANEL))


def packed_size(rows: int) -> int:
    """Return how many numbers all panels hold."""
    return sum((panel.stop - panel.start) * (rows - panel.start) for panel in panels(rows))


def unpack(numbers: npt.NDArray[np.float32], rows: int) -> npt.NDArray[np.float32]:
    """Return the matrix [rows, rows] of the numbers of its panels, one behind the other."""
    matrix, begin = np.empty((rows, rows), np.float32), 0
    for panel in panels(rows):
        shape = panel.stop - panel.start, rows - panel.start
        end = begin + shape[0] * shape[1]
        part = numbers[begin:end].reshape(shape)
        matrix[panel, panel.start :] = part
        matrix[panel.stop :, panel] = part[:, shape[0] :].T
        begin = end
    return matrix


@dataclasses.dataclass(frozen=True, eq=False)
class Symmetric(Expression):
    """The matrix [rows, rows] of panels, float32.

    Attributes:
        source: the panels' numbers, one behind the other.
        rows: of the matrix.
    """

    source: StoredBytes
    rows: int

    @property
    def dtype(self) -> ir.DataType:
        """float32."""
        return self.source.dtype

    @property
    def shape(self) -> Shape:
        """[rows, rows]."""
        return self.rows, self.rows

    @cached_property
    def digest(self) -> str:
        """Of the numbers."""
        return self.source.digest

    def evaluate(self, region: Region) -> Array:
        """Unpack all of it."""
        return unpack(self.source.numpy(), self.rows)[region]
