"""A format of up to 8 bits is a table: code -> value. A weight is value x scale, with one scale per group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Codes = npt.NDArray[np.uint8]
Values = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class TableFormat:
    """A number format.

    Attributes:
        name: what recipes and reports call it.
        bits: bits of one code.
        table: the value of each code, ``2**bits`` numbers; code c of two's complement int4 stands at index c mod 16.
        onnx_type: the standard ONNX type that holds the codes.
        zero_point: whether groups carry a zero point, a code that means 0.
    """

    name: str
    bits: int
    table: tuple[float, ...]
    onnx_type: ir.DataType
    zero_point: bool = False

    def __post_init__(self) -> None:
        if len(self.table) != 2**self.bits or len(set(self.table)) != len(self.table):
            raise ValueError(f"{self.name} needs {2**self.bits} different values, it has {len(self.table)}")

    @cached_property
    def values(self) -> npt.NDArray[np.float64]:
        """The table as an array, [2**bits]."""
        return np.array(self.table)

    @cached_property
    def limit(self) -> float:
        """The largest magnitude that is still half a step or less from a value on either side of zero."""
        ordered = np.sort(self.values)
        return float(min(ordered[-1] + (ordered[-1] - ordered[-2]) / 2, -ordered[0] + (ordered[1] - ordered[0]) / 2))

    def encode(self, numbers: Values) -> Codes:
        """Return the code of the value nearest to each of ``numbers`` (ties to the even neighbour in order), uint8."""
        order = np.argsort(self.values)
        ordered = self.values[order]
        if np.array_equal(np.diff(ordered), np.ones(len(ordered) - 1)):
            places = np.clip(np.rint(numbers - ordered[0]), 0, len(ordered) - 1).astype(np.uint8)
        else:
            places = np.searchsorted((ordered[1:] + ordered[:-1]) / 2, numbers).astype(np.uint8)
        codes: Codes = order.astype(np.uint8)[places]
        return codes

    def decode(self, codes: Codes) -> npt.NDArray[np.float64]:
        """Return the value of each code."""
        return self.values[codes]

    def to_onnx(self, codes: Codes) -> npt.NDArray[Any]:
        """Return the codes as an array of :attr:`onnx_type`."""
        return self.values.astype(self.onnx_type.numpy())[codes]


def signed_integer(bits: int, onnx_type: ir.DataType) -> TableFormat:
    """Return two's complement ``int<bits>``: -2^(bits-1) .. 2^(bits-1) - 1."""
    half = 2 ** (bits - 1)
    table = tuple(float(code if code < half else code - 2 * half) for code in range(2 * half))
    return TableFormat(f"int{bits}", bits, table, onnx_type)


def unsigned_integer(bits: int, onnx_type: ir.DataType) -> TableFormat:
    """Return ``uint<bits>``, 0 .. 2^bits - 1, with a zero point per group."""
    return TableFormat(f"uint{bits}", bits, tuple(float(c) for c in range(2**bits)), onnx_type, zero_point=True)
