"""Scales, zero points and minimums in fewer bytes: what holds their numbers to the last bit, and what makes them of it.

    Cast(narrow)                                                        float16 or bfloat16 that holds each number
    Reshape(GatherElements(table, Cast(indices), axis=1))                up to 16 or 256 numbers, in 4 or 8 bits
    Reshape(Mul(Cast(levels), Cast(steps)))                             small integers, a float16 for each run of them
    Reshape(Mul(Add(Cast(low), Reshape(Gather(pairs, Cast(high)))), Cast(steps)))               the same, of 6 bits

The second form holds E8M0 and E4M3 under a scale for the whole (MXFP4, NVFP4) and zero points; the third scales of
llama.cpp's K-quants, as its file has them. Both are found by the numbers alone: who made them does not matter, nor what
moved them since. onnxruntime computes such nodes of constants once, when it opens the file.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.editing import shared_constant
from graphopt.graph.weights import (
    Array,
    Bundle,
    Cast,
    Expression,
    Part,
    Region,
    Reshape,
    Shape,
    Sum,
    WeightTensor,
    expression_of,
    new_weight,
)

if TYPE_CHECKING:
    from graphopt.graph.editing import Inserter

_TABLE_LIMITS = {16: ir.DataType.UINT4, 256: ir.DataType.UINT8}

_SPANS = (16, 8)
"""Groups under one step: 16 in Q2_K, Q3_K and Q6_K, 8 in Q4_K, Q5_K and IQ4_XS."""

_GROUPS = -2
_SAMPLE = 1 << 12

_NODE_BYTES = 150
"""What a node takes in the file, with the names of what it reads and makes."""


@dataclasses.dataclass(frozen=True, eq=False)
class NarrowNumbers(Bundle):
    """Numbers in a type of fewer bytes that holds each of them."""

    source: Expression
    kind: ir.DataType

    @property
    def parts(self) -> dict[str, tuple[ir.DataType, Shape]]:
        """The numbers."""
        return {"narrow": (self.kind, self.source.shape)}

    @property
    def words(self) -> str:
        """What reports call it."""
        return self.kind.name.lower()

    def evaluate(self) -> dict[str, Array]:
        """Cast all numbers."""
        return {"narrow": Cast(self.source, self.kind).numpy()}

    def write(self, insert: Inserter, parts: dict[str, ir.Value]) -> ir.Value:
        """Write what makes the numbers of the parts."""
        return insert.op("Cast", [parts["narrow"]], self.source.shape, self.source.dtype, "wide", to=self.source.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class TableIndices(Bundle):
    """Numbers as their indices in tables of few numbers, one table for each of several equal parts.

    Attributes:
        source: the numbers.
        tables: how many tables there are, a divisor of the numbers: 1, or as many as experts or tiles of columns.
        size: entries of a table, 256 at most.
    """

    source: Expression
    tables: int
    size: int

    @property
    def parts(self) -> dict[str, tuple[ir.DataType, Shape]]:
        """Tables [tables, size] and indices [tables, numbers of each]."""
        kind = next(kind for limit, kind in _TABLE_LIMITS.items() if self.size <= limit)
        count = math.prod(self.source.shape) // self.tables
        return {"table": (self.source.dtype, (self.tables, self.size)), "indices": (kind, (self.tables, count))}

    @property
    def words(self) -> str:
        """What reports call it."""
        return f"indices of a table of {self.size}"

    def evaluate(self) -> dict[str, Array]:
        """Find the distinct numbers of each part, and the place of each number among them."""
        (table_kind, table_shape), (index_kind, index_shape) = self.parts.values()
        rows = _bits_of(self.source.numpy()).reshape(self.tables, -1)
        table, indices = np.empty(table_shape, rows.dtype), np.empty(index_shape, np.uint8)
        for index, row in enumerate(rows):
            distinct = np.unique(row)
            table[index] = np.pad(distinct, (0, self.size - len(distinct)), "edge")
            indices[index] = np.searchsorted(distinct, row)
        return {"table": table.view(table_kind.numpy()), "indices": indices.astype(index_kind.numpy())}

    def write(self, insert: Inserter, parts: dict[str, ir.Value]) -> ir.Value:
        """Write what makes the numbers of the parts."""
        dims, dtype = self.parts["indices"][1], self.source.dtype
        indices = insert.op("Cast", [parts["indices"]], dims, ir.DataType.INT32, "indices", to=ir.DataType.INT32)
        numbers = insert.op("GatherElements", [parts["table"], indices], dims, dtype, "numbers", axis=1)
        return insert.op("Reshape", [numbers, insert.integers(self.source.shape)], self.source.shape, dtype, "whole")


@dataclasses.dataclass(frozen=True, eq=False)
class LevelsOfRuns(Bundle):
    """Numbers [..., groups, 16] as small integers times a float16 number for each run of ``span`` groups of a column.

    Attributes:
        source: the numbers, float32 or float16.
        span: groups of a run.
        kind: the type of the integers: uint4, uint8 or int8. ``None`` for 6 bits, of which ``low`` are four, uint4, and
            ``high`` the other two of a column and its neighbour, uint4 for both.
        lowest: the integer whose 6 bits are 0.
    """

    source: Expression
    span: int
    kind: ir.DataType | None
    lowest: int = 0

    @property
    def dims(self) -> Shape:
        """Dimensions of the integers: runs, their groups and 16 columns."""
        *lead, groups, lanes = self.source.shape
        return (*lead, groups // self.span, self.span, lanes)

    @property
    def parts(self) -> dict[str, tuple[ir.DataType, Shape]]:
        """Levels [..., runs, span, 16], of 6 bits in two parts, and steps [..., runs, 1, 16]."""
        *lead, _, lanes = self.dims
        steps = {"steps": (ir.DataType.FLOAT16, (*lead, 1, lanes))}
        if self.kind is not None:
            return {"levels": (self.kind, self.dims), **steps}
        pairs = (*self.dims[:-1], lanes // 2)
        return {"low": (ir.DataType.UINT4, self.dims), "high": (ir.DataType.UINT4, pairs), **steps}

    @property
    def words(self) -> str:
        """What reports call it."""
        kind = "6 bits" if self.kind is None else self.kind.name.lower()
        return f"{kind} under a float16 number for {self.span}"

    def evaluate(self) -> dict[str, Array]:
        """Take the numbers apart once more.

        Raises:
            ValueError: they are no such products, although they were found to be.
        """
        factors = factors_of_runs(self.source.numpy(), self.span)
        if factors is None:
            raise ValueError(f"{self.source} does not lie in levels of runs of {self.span}")
        levels, steps = factors
        if self.kind is not None:
            return {"levels": levels.astype(self.kind.numpy()), "steps": steps}
        codes = (levels - self.lowest).astype(np.uint8)
        high = codes[..., 0::2] >> 4 | codes[..., 1::2] >> 4 << 2
        uint4 = ir.DataType.UINT4.numpy()
        return {"low": (codes & 15).astype(uint4), "high": high.astype(uint4), "steps": steps}

    def write(self, insert: Inserter, parts: dict[str, ir.Value]) -> ir.Value:
        """Write what makes the numbers of the parts."""
        wide = {
            name: insert.op("Cast", [parts[name]], dims, ir.DataType.FLOAT, name, to=ir.DataType.FLOAT)
            for name, (_, dims) in self.parts.items()
            if name != "high"
        }
        levels = wide["levels"] if self.kind is not None else self._join(insert, wide["low"], parts["high"])
        numbers = insert.op("Mul", [levels, wide["steps"]], self.dims, ir.DataType.FLOAT, "products")
        dims, dtype = self.source.shape, self.source.dtype
        whole = insert.op("Reshape", [numbers, insert.integers(dims)], dims, ir.DataType.FLOAT, "whole")
        return whole if dtype == ir.DataType.FLOAT else insert.op("Cast", [whole], dims, dtype, "narrow", to=dtype)

    def _join(self, insert: Inserter, low: ir.Value, high: ir.Value) -> ir.Value:
        """Add four bits and the two above them, which a table has for each pair of columns."""
        pairs, kind = self.parts["high"][1], ir.DataType.INT32
        codes = np.arange(16)
        numbers = (np.stack([codes % 4, codes // 4], 1) * 16 + self.lowest).astype(np.float32)
        table = shared_constant(insert.graph, f"six_bits.from.{self.lowest}", numbers)
        indices = insert.op("Cast", [high], pairs, kind, "high", to=kind)
        upper = insert.op("Gather", [table, indices], (*pairs, 2), ir.DataType.FLOAT, "pairs", axis=0)
        upper = insert.op("Reshape", [upper, insert.integers(self.dims)], self.dims, ir.DataType.FLOAT, "upper")
        return insert.op("Add", [low, upper], self.dims, ir.DataType.FLOAT, "levels")


@dataclasses.dataclass(frozen=True, eq=False)
class PickedNumbers(Expression):
    """What a graph makes of :class:`TableIndices`: table[i, indices[i, j]]."""

    table: Expression
    indices: Expression

    @property
    def dtype(self) -> ir.DataType:
        """As the table."""
        return self.table.dtype

    @property
    def shape(self) -> Shape:
        """As the indices."""
        return self.indices.shape

    @property
    def whole(self) -> frozenset[int]:
        """No axis: any part can be read by itself."""
        return frozenset()

    def evaluate(self, region: Region) -> Array:
        """Look up what lies in the region."""
        table = self.table.evaluate((region[0], slice(0, self.table.shape[1])))
        return np.take_along_axis(table, self.indices.evaluate(region).astype(np.int64), 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Products(Expression):
    """What a graph makes of :class:`LevelsOfRuns`: levels times steps, whose axes of size 1 are spread, in float32."""

    levels: Expression
    steps: Expression

    @property
    def dtype(self) -> ir.DataType:
        """As the operands, which are float32."""
        return self.levels.dtype

    @property
    def shape(self) -> Shape:
        """As the levels."""
        return self.levels.shape

    @property
    def whole(self) -> frozenset[int]:
        """No axis: any part can be read by itself."""
        return frozenset()

    def evaluate(self, region: Region) -> Array:
        """Multiply what lies in the region."""
        of_steps = (piece if size > 1 else slice(0, 1) for piece, size in zip(region, self.steps.shape, strict=True))
        return np.asarray(self.levels.evaluate(region) * self.steps.evaluate(tuple(of_steps)))


@dataclasses.dataclass(frozen=True, eq=False)
class PickedRows(Expression):
    """Rows of a small table: table[indices], [..., numbers of a row]."""

    table: Expression
    indices: Expression

    @property
    def dtype(self) -> ir.DataType:
        """As the table."""
        return self.table.dtype

    @property
    def shape(self) -> Shape:
        """A row for each place."""
        return (*self.indices.shape, *self.table.shape[1:])

    @property
    def whole(self) -> frozenset[int]:
        """No axis: any part can be read by itself."""
        return frozenset()

    def evaluate(self, region: Region) -> Array:
        """Look up what lies in the region."""
        rank = len(self.indices.shape)
        indices = self.indices.evaluate(region[:rank]).astype(np.int64)
        rows: Array = self.table.numpy()[indices]
        cut: tuple[object, ...] = (Ellipsis, *region[rank:])
        return np.asarray(rows[cut])  # type: ignore[index]


ScaleForm = NarrowNumbers | TableIndices | LevelsOfRuns


def shortest_form(source: Expression) -> ScaleForm | None:
    """Return what holds the numbers of ``source`` in the fewest bytes, to the last bit; ``None`` for as they are.

    Args:
        source: float32 or float16; [..., groups, 16] for levels of runs.
    """
    numbers = source.numpy()
    candidates: list[ScaleForm] = [NarrowNumbers(source, kind) for kind in _narrow_types(numbers, source.dtype)]
    indices = _indices_of(source, numbers)
    candidates += [] if indices is None else [indices]
    if indices is None or indices.size > 16:
        levels = _levels_of(source, numbers)
        candidates += [] if levels is None else [levels]
    best = min(candidates, key=bytes_of, default=None)
    is_short = best is not None and (bytes_of(best) < source.nbytes or isinstance(best, NarrowNumbers))
    return best if is_short else None


def bytes_of(form: ScaleForm) -> int:
    """Return the bytes of the parts of a form and, roughly, of the nodes behind the first."""
    nodes = 0 if isinstance(form, NarrowNumbers) else 3 * len(form.parts) - 4  # besides one
    return sum(Part(form, name).nbytes for name in form.parts) + nodes * _NODE_BYTES


def write_form(graph: ir.Graph, insert: Inserter, name: str, form: ScaleForm) -> ir.Value:
    """Write the initializers and the nodes of a form; return the value that is the numbers."""
    parts = {part: new_weight(graph, f"{name}.{part}", WeightTensor(Part(form, part))) for part in form.parts}
    return form.write(insert, parts)


def expression_of_nodes(value: ir.Value) -> Expression | None:
    """Return what nodes compute of constants; ``None`` where they are not those of a form."""
    node = value.producer()
    if node is None:
        return expression_of(value.const_value)
    first, *operands = (None if operand is None else expression_of_nodes(operand) for operand in node.inputs)
    if first is None or None in operands:
        return None
    match node.op_type:
        case "Cast":
            return Cast(first, ir.DataType(node.attributes.get_int("to", ir.DataType.FLOAT)))
        case "Reshape" if operands[0] is not None:
            return Reshape.to_dims(first, operands[0].numpy().tolist())
        case "Mul" if operands[0] is not None:
            return Products(first, operands[0])
        case "Add" if operands[0] is not None and first.shape == operands[0].shape:
            return Sum(first, operands[0])
        case "Gather" if operands[0] is not None and node.attributes.get_int("axis", 0) == 0:
            return PickedRows(first, operands[0])
        case "GatherElements" if operands[0] is not None and node.attributes.get_int("axis", 0) == 1:
            return PickedNumbers(first, operands[0])
        case _:
            return None


def _narrow_types(numbers: Array, dtype: ir.DataType) -> list[ir.DataType]:
    """Return the types of 16 bits that hold each of these numbers in float32."""
    if dtype != ir.DataType.FLOAT:
        return []
    kinds = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    with np.errstate(over="ignore"):
        return [kind for kind in kinds if np.array_equal(numbers.astype(kind.numpy()).astype(np.float32), numbers)]


def _indices_of(source: Expression, numbers: Array) -> TableIndices | None:
    """Return indices in tables, as few tables as will do: one, one for each expert, or for some tiles."""
    bits = _bits_of(numbers)
    for tables in _equal_parts(numbers.shape):
        size = _distinct(bits.reshape(tables, -1))
        if size is not None:
            return TableIndices(source, tables, size)
    return None


def _equal_parts(shape: Shape) -> list[int]:
    """Return in how many equal parts numbers are cut: all, experts, and halves of those down to a tile."""
    counts, lead = [1], shape[:-2]
    for size in lead:
        counts += [counts[-1] * part for part in range(2, size + 1) if size % part == 0] if size > 1 else []
        counts = counts if len(counts) < 8 else [*counts[:7], counts[-1]]
    return counts


def _distinct(rows: Array) -> int | None:
    """Return how many distinct numbers a row has at most; ``None`` for more than a byte tells apart."""
    largest, limit = 0, max(_TABLE_LIMITS)
    for row in rows:
        if len(np.unique(row[:_SAMPLE])) > limit or (count := len(np.unique(row))) > limit:
            return None
        largest = max(largest, count)
    return largest


def _levels_of(source: Expression, numbers: Array) -> LevelsOfRuns | None:
    """Return levels of runs that hold the numbers of packed codes, [..., groups, 16]."""
    if numbers.ndim < 3:
        return None
    for span in _SPANS:
        if numbers.shape[_GROUPS] % span:
            continue
        flat = numbers.reshape(-1, span, numbers.shape[-1])
        sample = flat[: max(1, _SAMPLE // (span * flat.shape[-1]))]
        if factors_of_runs(sample, span) is None:
            continue
        factors = factors_of_runs(numbers, span)
        if factors is not None:
            return _kind_of_levels(source, span, int(factors[0].min()), int(factors[0].max()))
    return None


def _kind_of_levels(source: Expression, span: int, smallest: int, largest: int) -> LevelsOfRuns | None:
    """Return the form of levels from ``smallest`` to ``largest`` with the fewest bits."""
    ranges = {ir.DataType.UINT4: (0, 15), ir.DataType.UINT8: (0, 255), ir.DataType.INT8: (-128, 127)}
    forms = [
        LevelsOfRuns(source, span, kind) for kind, (low, high) in ranges.items() if low <= smallest <= largest <= high
    ]
    if largest - smallest < 64:
        forms.append(LevelsOfRuns(source, span, None, min(smallest, 0)))
    return min(forms, key=bytes_of, default=None)


def factors_of_runs(numbers: Array, span: int) -> tuple[Array, Array] | None:
    """Return integers of 8 bits, int16 [..., runs, span, 16], and float16 steps [..., runs, 1, 16]; ``None`` if none.

    Their product in float32, cast to the type of ``numbers``, is ``numbers`` to the last bit. A step is the greatest
    common divisor of the numbers of a run, as integers of one exponent, over the least factor that makes it float16.

    Args:
        numbers: float32 or float16 [..., groups, 16], groups a multiple of ``span``.
        span: groups of a run.
    """
    *lead, groups, lanes = numbers.shape
    runs = numbers.reshape(*lead, groups // span, span, lanes)
    if not np.isfinite(runs).all():
        return None
    mantissas, exponents = np.frexp(np.abs(runs).astype(np.float64))
    integers, exponents = np.ldexp(mantissas, 24).astype(np.int64), exponents.astype(np.int64) - 24
    is_zero = integers == 0
    zeros = np.where(is_zero, 1, integers & -integers)  # the lowest bit that is set
    trailing = np.log2(zeros.astype(np.float64)).astype(np.int64)
    integers, exponents = integers >> trailing, np.where(is_zero, np.iinfo(np.int16).max, exponents + trailing)
    lowest_exponents = exponents.min(_GROUPS, keepdims=True)
    shifts = np.where(is_zero, 0, exponents - lowest_exponents)
    if (shifts > 7).any():  # an odd number is among them: levels would take more than 8 bits
        return None
    integers <<= shifts
    divisors = np.gcd.reduce(integers, axis=_GROUPS, keepdims=True)
    magnitudes = integers // np.maximum(divisors, 1)
    factor = _least_factor(divisors, lowest_exponents, magnitudes.max(_GROUPS, keepdims=True))
    if factor is None:
        return None
    steps = np.ldexp((divisors // factor).astype(np.float64), np.where(divisors, lowest_exponents, 0))
    signs = np.where(np.signbit(runs), -1, 1)
    negative = (signs < 0).all(_GROUPS, keepdims=True)
    if not (negative | (signs > 0).all(_GROUPS, keepdims=True)).all():
        # In two's complement the largest level is a negative one, as quantizers choose it.
        negative = np.take_along_axis(signs, magnitudes.argmax(_GROUPS, keepdims=True), _GROUPS) > 0
    has_zero = is_zero.any(_GROUPS, keepdims=True)  # a zero has the sign of its step
    is_turned = np.where(has_zero, (is_zero & (signs < 0)).any(_GROUPS, keepdims=True), negative)
    turns = np.where(is_turned, -1, 1)
    levels = (magnitudes * factor * signs * turns).astype(np.int16)
    halves = (steps * turns).astype(np.float16)
    products = (levels.astype(np.float32) * halves.astype(np.float32)).astype(numbers.dtype)
    return (levels, halves) if np.array_equal(_bits_of(products), _bits_of(runs)) else None


def _least_factor(divisors: Array, exponents: Array, largest: Array) -> Array | None:
    """Return by what each divisor is divided so that float16 holds it, while levels of 8 bits hold the rest."""
    factors = np.zeros_like(divisors)
    factors[divisors == 0] = 1
    for factor in range(1, 256):
        remaining = np.nonzero(factors == 0)
        if not len(remaining[0]):
            return factors
        divisor = divisors[remaining]
        if (largest[remaining] * factor > 255).any():
            return None
        steps = np.ldexp((divisor // factor).astype(np.float64), exponents[remaining])
        with np.errstate(over="ignore"):
            halves = steps.astype(np.float16).astype(np.float64)
        fits = (divisor % factor == 0) & (halves == steps) & (steps > 0)
        factors[tuple(axis[fits] for axis in remaining)] = factor
    return None


def _bits_of(numbers: Array) -> Array:
    """Return numbers as unsigned integers of the same bits, so that 0 is not -0, and NaN is itself."""
    whole = np.ascontiguousarray(numbers)
    return whole.view({2: np.uint16, 4: np.uint32}[whole.dtype.itemsize])
