"""Matrices that a file stores as codes, and these codes in formats of ours: what the file holds, not rounded again."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights import Array, Bundle, Expression, Region, Shape
from graphopt.numerics.formats import FORMATS, Format, format_of

if TYPE_CHECKING:
    from graphopt.quantization.entry_codes import EntryCoding, EntryRows

# What DequantizeLinear has a type for and onnxruntime a kernel.
_STANDARD = (ir.DataType.INT4, ir.DataType.INT8, ir.DataType.UINT4, ir.DataType.UINT8)
_STANDARD_GROUPS = (16, 32, 64, 128, 256)


class Coding(NamedTuple):
    """How a matrix is stored.

    Attributes:
        format: what a code means.
        group: columns that share a scale.
        minimums: whether each group has a minimum, added behind the scale.
        zero_points: whether each group has a zero point, an integer, subtracted in front of the scale.
        half: whether scales, minimums and zero points are float16 numbers.
        column_order: the order of columns in which groups lie side by side, int64; ``None`` where they do already.
    """

    format: Format
    group: int
    minimums: bool = False
    zero_points: bool = False
    half: bool = False
    column_order: Array | None = None


class CodedRows(NamedTuple):
    """Codes of some rows.

    Attributes:
        codes: uint8 [rows, columns], places in the table of the format, columns in the order of the file.
        scales: float32 [rows, groups].
        offsets: minimums or zero points, float32 [rows, groups]; ``None`` where there are none.
    """

    codes: Array
    scales: Array
    offsets: Array | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class CodedTensor(Expression):
    """A tensor that is stored as codes and evaluates to the numbers that they mean, float32."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """What the file calls its codes, such as Q4_1 or gptq."""

    @property
    @abstractmethod
    def coding(self) -> Coding | EntryCoding | None:
        """How it is stored; ``None`` where no format of ours can say it."""

    @abstractmethod
    def coded_rows(self, rows: Array) -> CodedRows | EntryRows:
        """Return the codes of some rows, int64 [rows].

        Raises:
            ValueError: codes and scales do not mean the numbers of the tensor.
        """

    @property
    def dtype(self) -> ir.DataType:
        """float32."""
        return ir.DataType.FLOAT

    @property
    def whole(self) -> frozenset[int]:
        """No axis: any part can be read by itself."""
        return frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class CodedMatrix(CodedTensor):
    """w[r, c] = (value of codes[r, c] - zero_points[r, g]) scales[r, g], where g is the group of column c.

    Attributes:
        method: the method that made it, such as gptq.
        codes: uint8 [rows, columns], places in the table of the format.
        format_name: a format, or the value of each code; its zero points are ``zero_points`` and not codes of its own.
        group: columns that share a scale; the last group may be shorter.
        scales: [rows, groups], any floating type.
        zero_points: uint8 or int8 [rows, groups]; ``None`` for none.
        zero_shift: is added to each zero point.
        column_groups: integers [columns], the group of each column; ``None`` for ``column // group``.
    """

    method: str
    codes: Expression
    format_name: str | tuple[float, ...]
    group: int
    scales: Expression
    zero_points: Expression | None = None
    zero_shift: int = 0
    column_groups: Expression | None = None

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        groups = (rows, -(-columns // self.group))
        for part in (self.scales, self.zero_points):
            if part is not None and part.shape != groups:
                raise ValueError(f"codes {list(self.codes.shape)} in groups of {self.group} do not go with {part}")
        if self.column_groups is not None and self.column_groups.shape != (columns,):
            raise ValueError(f"{columns} columns do not go with {self.column_groups}")

    @property
    def kind(self) -> str:
        """The method."""
        return self.method

    @property
    def shape(self) -> Shape:
        """As the codes."""
        return self.codes.shape

    @cached_property
    def coding(self) -> Coding | None:
        """Zero points that are all in the middle of the codes are none: the codes are then two's complement."""
        columns = self.shape[1]
        order = self._column_order
        if columns % self.group or (order is not None and len(order) != columns):
            return None
        format, half = self._format, self.scales.dtype == ir.DataType.FLOAT16
        return Coding(format, self.group, False, self._has_zero_points, half, order)

    @cached_property
    def _column_order(self) -> Array | None:
        """See :class:`Coding`; empty where groups differ in size."""
        if self.column_groups is None:
            return None
        groups = self.column_groups.numpy().astype(np.int64)
        if np.array_equal(groups, np.arange(len(groups)) // self.group):
            return None
        sizes = np.bincount(groups)
        is_even = len(sizes) == self.scales.shape[1] and (sizes == self.group).all()
        return np.argsort(groups, kind="stable") if is_even else np.zeros(0, np.int64)

    @cached_property
    def _has_zero_points(self) -> bool:
        if self.zero_points is None:
            return False
        return not bool((self.zero_points.numpy().astype(np.int16) + self.zero_shift == self._middle).all())

    @property
    def _middle(self) -> int:
        return 1 << (format_of(self.format_name).bits - 1)

    @property
    def _format(self) -> Format:
        format = format_of(self.format_name)
        is_signed = self.zero_points is not None and not self._has_zero_points
        return FORMATS[f"int{format.bits}"] if is_signed else format

    def coded_rows(self, rows: Array) -> CodedRows:
        """Return the codes as the file has them, but for the sign bit that stands for zero points in the middle."""
        codes = self.codes.numpy()[rows]
        offsets = None
        if self._has_zero_points:
            assert self.zero_points is not None
            offsets = (self.zero_points.numpy()[rows].astype(np.int16) + self.zero_shift).astype(np.float32)
        elif self.zero_points is not None:
            codes = codes ^ np.uint8(self._middle)
        order = self._column_order
        codes = codes if order is None else codes[:, order]
        return CodedRows(codes, self.scales.numpy()[rows].astype(np.float32), offsets)

    def evaluate(self, region: Region) -> Array:
        """Decode what lies in the region, in float32."""
        rows, columns = region
        if self.column_groups is None:
            first = columns.start // self.group
            groups = np.arange(columns.start, columns.stop) // self.group - first
            group_region = (rows, slice(first, -(-columns.stop // self.group)))
        else:
            groups = self.column_groups.evaluate((columns,)).astype(np.int64)
            group_region = (rows, slice(0, self.scales.shape[1]))
        numbers = _values(format_of(self.format_name))[self.codes.evaluate(region)]
        if self.zero_points is not None:
            points = self.zero_points.evaluate(group_region).astype(np.float32) + np.float32(self.zero_shift)
            numbers -= points[:, groups]
        numbers *= self.scales.evaluate(group_region).astype(np.float32)[:, groups]
        return numbers


def _values(format: Format) -> Array:
    """Return the value of each code, float32; NaN and infinity where the standard of a format has them."""
    onnx_type = getattr(format, "onnx_type", None)
    if onnx_type in (ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2):
        return np.asarray(np.arange(256, dtype=np.uint8).view(onnx_type.numpy()).astype(np.float32))
    return format.operands["table"]


@dataclasses.dataclass(frozen=True, eq=False)
class StackedCodes(CodedTensor):
    """Several tensors of one coding, the rows of one behind those of the other.

    Raises:
        ValueError: their codings or widths differ, or columns have an order of their own.
    """

    sources: tuple[CodedTensor, ...]

    def __post_init__(self) -> None:
        stackings = {stacking_of(source) for source in self.sources}
        if len(stackings) != 1 or None in stackings:
            raise ValueError(f"these are not of one coding: {', '.join(map(str, self.sources))}")

    @property
    def kind(self) -> str:
        """That of each of them."""
        return self.sources[0].kind

    @property
    def shape(self) -> Shape:
        """Rows of all."""
        return (sum(source.shape[0] for source in self.sources), self.sources[0].shape[1])

    @property
    def coding(self) -> Coding | EntryCoding | None:
        """That of each of them."""
        return self.sources[0].coding

    def evaluate(self, region: Region) -> Array:
        """Evaluate the parts that the region touches."""
        rows, columns = region
        parts = []
        for first, source in zip(self._first_rows(), self.sources, strict=True):
            begin, end = max(rows.start - first, 0), min(rows.stop - first, source.shape[0])
            if begin < end:
                parts.append(source.evaluate((slice(begin, end), columns)))
        return np.concatenate(parts) if parts else np.zeros((0, columns.stop - columns.start), np.float32)

    def coded_rows(self, rows: Array) -> CodedRows | EntryRows:
        """Return the codes of some rows, each from its tensor.

        Raises:
            ValueError: as :meth:`CodedTensor.coded_rows`.
        """
        firsts = self._first_rows()
        owners = np.searchsorted(firsts, rows, "right") - 1
        order = np.argsort(owners, kind="stable")
        parts = [
            self.sources[owner].coded_rows(rows[order[owners[order] == owner]] - firsts[owner])
            for owner in np.unique(owners)
        ]
        back = np.argsort(order, kind="stable")
        arrays = (
            np.concatenate(arrays)[back] if arrays[0] is not None else None for arrays in zip(*parts, strict=True)
        )
        rows_of_all: CodedRows | EntryRows = type(parts[0])(*arrays)
        return rows_of_all

    def _first_rows(self) -> Array:
        return np.cumsum([0, *(source.shape[0] for source in self.sources[:-1])])


def stacking_of(tensor: CodedTensor) -> tuple[object, ...] | None:
    """Return what tensors must have in common to be stacked; ``None`` for one that cannot be."""
    coding = tensor.coding
    if coding is None or coding.column_order is not None or len(tensor.shape) != 2:
        return None
    return (tensor.kind, tensor.shape[1], *coding)


@dataclasses.dataclass(frozen=True, eq=False)
class UnpackedBits(Expression):
    """Codes of 1 to 8 bits, uint8, one behind the other in the bits of integers along one axis, lowest bits first.

    Attributes:
        source: integers, of any size.
        bits: of a code.
        axis: along which codes lie in integers.
        size: how many codes there are along it; what is left of the last integer is padding.
        high_first: codes of 4 bits lie in a byte with the higher half first.
    """

    source: Expression
    bits: int
    axis: int
    size: int
    high_first: bool = False

    def __post_init__(self) -> None:
        words = -(-self.size * self.bits // self.source.dtype.bitwidth)
        if self.source.shape[self.axis] < words:
            raise ValueError(f"{self.size} codes of {self.bits} bits do not lie in {self.source}")

    @property
    def dtype(self) -> ir.DataType:
        """uint8."""
        return ir.DataType.UINT8

    @property
    def shape(self) -> Shape:
        """That of the integers, with more codes along the axis."""
        dims = list(self.source.shape)
        dims[self.axis] = self.size
        return tuple(dims)

    @property
    def whole(self) -> frozenset[int]:
        """As the integers."""
        return self.source.whole

    def evaluate(self, region: Region) -> Array:
        """Unpack the integers that the region touches."""
        word = self.source.dtype.bitwidth
        run = math.lcm(word, self.bits)  # bits after which codes and integers begin together again
        codes_of_run, words_of_run = run // self.bits, run // word
        piece = region[self.axis]
        first, last = piece.start // codes_of_run, -(-piece.stop // codes_of_run)
        stop = min(last * words_of_run, self.source.shape[self.axis])
        word_region = (*region[: self.axis], slice(first * words_of_run, stop), *region[self.axis + 1 :])
        words = np.ascontiguousarray(np.moveaxis(self.source.evaluate(word_region), self.axis, -1))
        codes = self._unpack(words.view(np.uint8))
        start = piece.start - first * codes_of_run
        return np.ascontiguousarray(np.moveaxis(codes[..., start : start + piece.stop - piece.start], -1, self.axis))

    def _unpack(self, octets: Array) -> Array:
        if 8 % self.bits == 0:
            shifts = np.arange(0, 8, self.bits, dtype=np.uint8)
            shifts = shifts[::-1] if self.high_first else shifts
            codes = (octets[..., None] >> shifts) & np.uint8(2**self.bits - 1)
            return codes.reshape(*octets.shape[:-1], -1)
        flags = np.unpackbits(octets, axis=-1, bitorder="little")
        count = flags.shape[-1] // self.bits
        flags = flags[..., : count * self.bits].reshape(*octets.shape[:-1], count, self.bits)
        return np.packbits(flags, axis=-1, bitorder="little")[..., 0]


@dataclasses.dataclass(frozen=True, eq=False)
class RepeatedRows(Expression):
    """Each row of a matrix ``times`` times, cut to ``rows`` rows."""

    source: Expression
    times: int
    rows: int

    @property
    def dtype(self) -> ir.DataType:
        """As the matrix."""
        return self.source.dtype

    @property
    def shape(self) -> Shape:
        """With more rows."""
        return (self.rows, *self.source.shape[1:])

    @property
    def whole(self) -> frozenset[int]:
        """As the matrix."""
        return self.source.whole

    def evaluate(self, region: Region) -> Array:
        """Repeat the rows that the region touches."""
        rows = region[0]
        first = rows.start // self.times
        rows_read = self.source.evaluate((slice(first, -(-rows.stop // self.times)), *region[1:]))
        return np.asarray(rows_read[np.arange(rows.start, rows.stop) // self.times - first])


@dataclasses.dataclass(frozen=True, eq=False)
class KeptCodes(Bundle):
    """Codes, scales and perhaps minimums or zero points of rows of a tensor.

    Attributes:
        source: the tensor, whose coding a format of ours can say.
        order: the rows, int64.
        looked_up: rows stay rows and codes are int8, as a table that is looked up wants them. Otherwise rows become
            columns, as a product reads them, and codes have the type that ONNX has for the format: int4 or int8, uint4
            or uint8. Where it has none they are uint8, places in the format's table.
        standard: whether to use what ONNX has for the format. Without, codes are always uint8, and scales as short as
            in the file.
        as_zero_points: minimums become zero points, values of the format's table in float32.
    """

    source: CodedTensor
    order: Array
    looked_up: bool = False
    standard: bool = True
    as_zero_points: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.source.coding, Coding) or (self.looked_up and not self.can_be_looked_up):
            raise ValueError(f"{self.source} has no codes that can be kept")

    @property
    def coding(self) -> Coding:
        """How the tensor is stored."""
        coding = self.source.coding
        assert isinstance(coding, Coding)
        return coding

    def _coded_rows(self) -> CodedRows:
        rows = self.source.coded_rows(self.order)
        assert isinstance(rows, CodedRows)
        return rows

    @property
    def format(self) -> Format:
        """The format."""
        return self.coding.format

    @property
    def group(self) -> int:
        """Numbers that share a scale."""
        return self.coding.group

    @property
    def has_minimums(self) -> bool:
        """Whether a group has a minimum of its own."""
        return self.coding.minimums

    @property
    def can_be_looked_up(self) -> bool:
        """Whether rows can be looked up as int8 with scales alone."""
        coding, levels = self.coding, self.format.levels
        has_scales_alone = not coding.minimums and not coding.zero_points and coding.column_order is None
        return has_scales_alone and levels is not None and bool((levels.values == np.rint(levels.values)).all())

    @cached_property
    def is_standard(self) -> bool:
        """Whether ``DequantizeLinear`` can say it, and onnxruntime has a kernel for it."""
        onnx_type = getattr(self.format, "onnx_type", None)
        has_form = self.standard and onnx_type in _STANDARD and not self.has_minimums
        has_form = has_form and self.group in _STANDARD_GROUPS
        if has_form and self.coding.zero_points:
            points = self._coded_rows().offsets
            assert points is not None
            has_form = bool((points >= 0).all() and (points < 2**self.format.bits).all())
        return self.looked_up or has_form

    @property
    def parts(self) -> dict[str, tuple[ir.DataType, Shape]]:
        """Scales and minimums of one level are float16, as in the file, but for a product in standard form."""
        rows, columns = len(self.order), self.source.shape[1]
        codes, scales = (rows, columns), (rows, columns // self.group)
        if not self.looked_up:
            codes, scales = codes[::-1], scales[::-1]
        onnx_type = getattr(self.format, "onnx_type", None) if self.is_standard else None
        kind = ir.DataType.INT8 if self.looked_up else onnx_type or ir.DataType.UINT8
        half = self.coding.half and (self.looked_up or not self.is_standard) and not self.as_zero_points
        numbers = ir.DataType.FLOAT16 if half else ir.DataType.FLOAT
        parts: dict[str, tuple[ir.DataType, Shape]] = {"codes": (kind, codes), "scales": (numbers, scales)}
        if self.has_minimums:
            parts["zero_points" if self.as_zero_points else "minimums"] = (numbers, scales)
        elif self.coding.zero_points:
            parts["zero_points"] = (kind if self.is_standard else numbers, scales)
        return parts

    def evaluate(self) -> dict[str, Array]:
        """Return the parts.

        Raises:
            ValueError: the file means numbers that its own scales cannot make, as a NaN among them.
        """
        codes, scales, offsets = self._coded_rows()
        parts = {"scales": scales}
        if self.has_minimums:
            assert offsets is not None
            if self.as_zero_points:
                # A group without a step is its minimum, everywhere.
                parts["scales"] = np.where(scales == 0, 1, scales.astype(np.float64))
                parts["zero_points"] = -offsets.astype(np.float64) / parts["scales"]
            else:
                parts["minimums"] = offsets
        elif offsets is not None:
            parts["zero_points"] = offsets
        return {"codes": self._stored_codes(codes)} | {
            name: self._in_layout(array).astype(self.parts[name][0].numpy()) for name, array in parts.items()
        }

    def _stored_codes(self, codes: Array) -> Array:
        kind, matrix = self.parts["codes"][0], self._in_layout(codes)
        if not self.looked_up and not self.is_standard:
            return matrix
        levels = self.format.operands["table"][matrix]
        return np.asarray(levels.astype(np.int16).astype(kind.numpy()))

    def _in_layout(self, matrix: Array) -> Array:
        return np.ascontiguousarray(matrix if self.looked_up else matrix.T)
