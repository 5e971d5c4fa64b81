"""Matrices that a file stores as codes of vectors, and these codes as ``MatMulCodebook`` reads them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights import Array, Bundle, Shape
from graphopt.runtime_ops.dequantize_codebook.spec.packing import LANES, slice_bits, to_blocks

if TYPE_CHECKING:
    from graphopt.quantization.matrix_codes import CodedTensor


@dataclasses.dataclass(frozen=True)
class Codebook:
    """What codes of vectors mean, as ``DequantizeCodebook`` defines it; rows of a file are columns of the product.

    Attributes:
        name: what reports call it.
        books: the entries, float32 [entries, numbers of an entry].
        index_bits: of a code, for the first book.
        second_bits: for the second; 0 for one book.
        sign_bits: for signs.
        shifts: one number, or two that a bit of the code chooses between.
        level_bits: of a level.
        factors: what scales are multiplied by at each level.
        offsets: what is added in front of scales at each level.
        group: numbers that share a level.
        span: numbers that share a scale.
    """

    name: str
    books: tuple[tuple[float, ...], ...]
    index_bits: int
    second_bits: int = 0
    sign_bits: int = 0
    shifts: tuple[float, ...] = (0.0,)
    level_bits: int = 0
    factors: tuple[float, ...] = (1.0,)
    offsets: tuple[float, ...] = (0.0,)
    group: int = 32
    span: int = 256

    @property
    def size(self) -> int:
        """Numbers of an entry."""
        return len(self.books[0])

    @property
    def bits(self) -> int:
        """Of a code."""
        return self.index_bits + self.second_bits + self.sign_bits + len(self.shifts) - 1

    @property
    def operands(self) -> dict[str, Array]:
        """What the operator reads besides codes, scales and levels, by the names of its ports."""
        return {
            "level_table": np.array([self.factors, self.offsets], np.float32),
            "books": np.array(self.books, np.float32),
            "shifts": np.array(self.shifts, np.float32),
        }

    def attributes(self, rows: int, columns: int) -> dict[str, int]:
        """Return the attributes of the operator for a matrix [rows, columns] of a product."""
        names = ("index_bits", "second_bits", "sign_bits", "level_bits", "group", "span")
        return {"rows": rows, "columns": columns, "axis": 0, **{name: getattr(self, name) for name in names}}


class EntryRows(NamedTuple):
    """Codes of some rows.

    Attributes:
        codes: uint32 [rows, entries of a row].
        levels: uint8 [rows, groups].
        scales: float16 [rows, spans].
    """

    codes: Array
    levels: Array
    scales: Array


class EntryCoding(NamedTuple):
    """How a matrix is stored: by a codebook, with columns in their order."""

    codebook: Codebook
    column_order: Array | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class KeptEntries(Bundle):
    """Codes, scales and levels of rows of a tensor, which become columns, as a product reads them.

    Attributes:
        source: the tensor, whose coding is an :class:`EntryCoding`.
        order: the rows, int64.
    """

    source: CodedTensor
    order: Array

    def __post_init__(self) -> None:
        if not isinstance(self.source.coding, EntryCoding):
            raise ValueError(f"{self.source} has no codes of vectors")

    @property
    def codebook(self) -> Codebook:
        """What its codes mean."""
        coding = self.source.coding
        assert isinstance(coding, EntryCoding)
        return coding.codebook

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the product's matrix."""
        return self.source.shape[1], len(self.order)

    @property
    def parts(self) -> dict[str, tuple[ir.DataType, Shape]]:
        """Codes, scales and levels; one level that is not read where there are none."""
        book, (rows, columns) = self.codebook, self.matrix_shape
        tiles = -(-columns // LANES)
        levels = (tiles, -(-rows // book.group), 2 * book.level_bits) if book.level_bits else (1, 1, 1)
        return {
            "codes": (ir.DataType.UINT8, (tiles, -(-rows // book.size), 2 * book.bits)),
            "scales": (ir.DataType.FLOAT16, (tiles, -(-rows // book.span), LANES)),
            "levels": (ir.DataType.UINT8, levels),
        }

    def evaluate(self) -> dict[str, Array]:
        """Return the parts."""
        book = self.codebook
        rows = self.source.coded_rows(self.order)
        assert isinstance(rows, EntryRows)
        levels = np.zeros((1, 1, 1), np.uint8)
        if book.level_bits:
            levels = slice_bits(_in_tiles(rows.levels.astype(np.uint32)), book.level_bits)
        codes = to_blocks(np.ascontiguousarray(rows.codes.T), book.size, 0, book.bits)
        return {"codes": codes, "scales": _in_tiles(rows.scales), "levels": levels}


def _in_tiles(numbers: Array) -> Array:
    """Return numbers [columns, groups] as [tiles, groups, 16], the last tile padded with 0."""
    columns, groups = numbers.shape
    whole = np.pad(numbers, ((0, -columns % LANES), (0, 0)))
    return np.ascontiguousarray(whole.reshape(-1, LANES, groups).transpose(0, 2, 1))
