"""Scales, zero points and minimums in two levels: small integers under a float16 number for a run of groups.

llama.cpp's K-quants and IQ4_XS have such scales. They are found by the numbers alone: who made them does not matter,
nor what moved them since. See :mod:`graphopt.runtime_ops.matmul_table.spec.levels` for what the operators read.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights import Array, Bundle, Expression, Region, Shape
from graphopt.runtime_ops.matmul_table.spec.levels import SPANS, WIDTHS, bytes_of_tile, pack_levels, unpack_levels

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOWEST = (0, -8, -32, -128)
"""Integers that code 0 may stand for: codes without a sign, and those of 4, 6 and 8 bits with one."""

_GROUPS = -2
_SAMPLE = 1 << 12


@dataclasses.dataclass(frozen=True, eq=False)
class PackedLevels(Bundle):
    """Numbers [..., tiles, groups, 16] in two levels, as products read them.

    Attributes:
        source: the numbers, float32 or float16.
        span: groups under one step.
        low: the integer of code 0.
        bits: of a code.
    """

    source: Expression
    span: int
    low: int
    bits: int

    @property
    def parts(self) -> dict[str, tuple[ir.DataType, Shape]]:
        """The bytes, uint8 [..., tiles, bytes]."""
        *lead, groups, _ = self.source.shape
        return {"packed": (ir.DataType.UINT8, (*lead, bytes_of_tile(groups, self.bits, self.span)))}

    @property
    def words(self) -> str:
        """What reports call it."""
        return f"{self.bits} bits under a float16 number for {self.span}"

    def evaluate(self) -> dict[str, Array]:
        """Take the numbers apart once more.

        Raises:
            ValueError: they are no such products, although they were found to be.
        """
        factors = factors_of_runs(self.source.numpy(), self.span)
        if factors is None:
            raise ValueError(f"{self.source} does not lie in levels of runs of {self.span}")
        levels, steps = factors
        return {"packed": pack_levels(levels.reshape(self.source.shape), steps.squeeze(_GROUPS), self.bits, self.low)}


@dataclasses.dataclass(frozen=True, eq=False)
class UnpackedLevels(Expression):
    """What :class:`PackedLevels` was made of, in float32."""

    source: Expression
    groups: int
    span: int
    low: int

    @property
    def dtype(self) -> ir.DataType:
        """float32, which holds each product."""
        return ir.DataType.FLOAT

    @property
    def shape(self) -> Shape:
        """[..., tiles, groups, 16]."""
        return (*self.source.shape[:-1], self.groups, 16)

    def evaluate(self, region: Region) -> Array:
        """Multiply all levels by their steps."""
        return unpack_levels(self.source.numpy(), self.groups, self.span, self.low)[region]


def packed_levels(sources: Sequence[Expression]) -> list[PackedLevels] | None:
    """Return numbers of one product in two levels of one form; ``None`` if there are none.

    Args:
        sources: scales, and zero points or minimums where there are any: float32 or float16 [..., groups, 16].
    """
    arrays = [source.numpy() for source in sources]
    for span in SPANS:
        ranges = [_range_of_levels(numbers, span) for numbers in arrays]
        ends = [limits for limits in ranges if limits is not None]
        if len(ends) < len(sources):
            continue
        whole = min(smallest for smallest, _ in ends), max(largest for _, largest in ends)
        choices = [(bits, low) for low in _LOWEST if (bits := _bits_for(whole, low)) is not None]
        if choices:
            bits, low = min(choices, key=lambda choice: choice[0])
            return [PackedLevels(source, span, low, bits) for source in sources]
    return None


def _range_of_levels(numbers: Array, span: int) -> tuple[int, int] | None:
    """Return the smallest and the largest level of numbers in runs of ``span``; ``None`` where they are none."""
    if numbers.ndim < 3 or numbers.shape[_GROUPS] % span:
        return None
    flat = numbers.reshape(-1, span, numbers.shape[-1])
    sample = flat[: max(1, _SAMPLE // (span * flat.shape[-1]))]
    if factors_of_runs(sample, span) is None or (factors := factors_of_runs(numbers, span)) is None:
        return None
    return int(factors[0].min()), int(factors[0].max())


def _bits_for(ends: tuple[int, int], low: int) -> int | None:
    """Return the fewest bits of codes that reach from ``low`` to what is asked for."""
    smallest, largest = ends
    return next((bits for bits in WIDTHS if low <= smallest and largest < low + 2**bits), None)


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
    """Return numbers as unsigned integers of the same bits, so that 0 is not -0."""
    whole = np.ascontiguousarray(numbers)
    return whole.view({2: np.uint16, 4: np.uint32}[whole.dtype.itemsize])
