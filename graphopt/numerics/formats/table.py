"""A format of up to 8 bits is a table: code -> value. A weight is value x scale, with one scale per group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.numerics.formats.steps import integer_step

if TYPE_CHECKING:
    import onnx_ir as ir

Codes = npt.NDArray[np.uint8]
Values = npt.NDArray[np.floating[Any]]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TableFormat:
    """A number format.

    Several codes may mean the same number: -0 and 0 do, and what is NaN or infinite in the standard of a format means
    the largest number here. :meth:`encode` writes the lowest of such codes, so neither -0 nor those.

    Attributes:
        name: what recipes and reports call it.
        bits: bits of one code, 1 to 8.
        table: the value of each code, at most ``2**bits`` numbers that float32 holds; code c of two's complement int4
            stands at index c mod 16.
        onnx_type: the standard ONNX type that holds the codes, ``None`` where there is none that a runtime loads.
        zero_point: whether groups carry a zero point, a code that means 0; the table is then 0, 1, 2, ...

    Raises:
        ValueError: the table does not fit its description.
    """

    name: str
    bits: int
    table: tuple[float, ...]
    onnx_type: ir.DataType | None = None
    zero_point: bool = False

    def __post_init__(self) -> None:
        if self.bits not in range(1, 9) or not 1 <= len(self.table) <= 2**self.bits:
            raise ValueError(f"{self.name} has {len(self.table)} values in {self.bits} bits; 1 to 8 bits hold 2^bits")
        with np.errstate(over="ignore"):
            held = np.array(self.table, np.float32)
        if not np.array_equal(held, np.array(self.table)) or not np.isfinite(held).all() or not held.any():
            raise ValueError(f"the values of {self.name} must be finite, of float32, and not all zero: {self.table}")
        if self.zero_point and self.table != tuple(range(2**self.bits)):
            raise ValueError(f"{self.name} carries zero points, so its values must be 0 .. {2**self.bits - 1}")

    @cached_property
    def values(self) -> Doubles:
        """The table as an array, [entries]."""
        return np.array(self.table)

    @cached_property
    def limit(self) -> float:
        """What the largest magnitude of a group is mapped to where a scale is chosen by extremes.

        With equal steps (integers, ternary) it is half a step beyond the end of the table, so that nothing within errs
        by more than half a step. With others (floating point, nf4, sf4) it is the end itself, as their papers have it.
        Of the two ends the nearer to zero counts; a table without numbers on one side of zero has one end.
        """
        ordered, _ = self.ordered
        steps = np.diff(ordered)
        beyond = float(steps[0]) / 2 if len(steps) and (steps == steps[0]).all() else 0.0
        return min(float(end) + beyond for end in (ordered[-1], -ordered[0]) if end > 0)

    @cached_property
    def ordered(self) -> tuple[Doubles, Codes]:
        """The different values in order, and the lowest code of each."""
        values, codes = np.unique(self.values, return_index=True)
        return values, codes.astype(np.uint8)

    @cached_property
    def is_counting(self) -> bool:
        """Whether the values are consecutive integers, every second code even, the lowest one too."""
        values, codes = self.ordered
        return bool((np.diff(values) == 1).all() and (codes % 2 == np.arange(len(codes)) % 2).all())

    @cached_property
    def halfway(self) -> Doubles:
        """Where the nearest value changes: halfway between neighbours, [different values - 1]."""
        values, _ = self.ordered
        return (values[1:] + values[:-1]) / 2

    @cached_property
    def ties(self) -> Doubles:
        """For each value, the number halfway to the next one if it is rounded up, else NaN."""
        _, codes = self.ordered
        goes_up = (codes[:-1] % 2 == 1) & (codes[1:] % 2 == 0)
        return np.append(np.where(goes_up, self.halfway, np.nan), np.nan)

    def encode(self, numbers: Values) -> Codes:
        """Return the code of the value nearest to each of ``numbers``, uint8.

        Beyond the ends it is the end. A tie goes to the neighbour whose code is even, as in IEEE 754 and as usual for
        integers; where both codes are even, or both odd, to the lower value.
        """
        values, codes = self.ordered
        if self.is_counting:
            counted: Codes = codes[np.clip(np.rint(numbers - values[0]), 0, len(values) - 1).astype(np.uint8)]
            return counted
        places = np.searchsorted(self.halfway, numbers)
        chosen: Codes = codes[places + (self.ties[places] == numbers)]
        return chosen

    def decode(self, codes: Codes) -> Doubles:
        """Return the value of each code.

        Raises:
            IndexError: a code has no value.
        """
        return self.values[codes]

    def to_onnx(self, codes: Codes) -> npt.NDArray[Any]:
        """Return the codes as an array of :attr:`onnx_type`.

        Raises:
            ValueError: there is no such type.
        """
        if self.onnx_type is None:
            raise ValueError(f"ONNX has no type for {self.name}")
        held: npt.NDArray[Any] = self.values.astype(self.onnx_type.numpy())[codes]
        return held

    def integer_step(self, limit: float) -> float | None:
        """Return the largest step of which all values are integer multiples of magnitude ``limit`` or less, or none."""
        return integer_step(self.table, limit)
