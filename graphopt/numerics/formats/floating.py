"""Floating point of a few bits: a sign, then an exponent, then a mantissa."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from graphopt.numerics.formats.table import TableFormat

if TYPE_CHECKING:
    import onnx_ir as ir


def floating_point(
    exponent: int, mantissa: int, onnx_type: ir.DataType | None = None, *, reserved: int = 0
) -> TableFormat:
    """Return ``fp<bits>-e<exponent>m<mantissa>`` (``fp4`` for E2M1), with subnormal numbers.

    With E the bits of the exponent as an integer, M those of the mantissa and bias = 2^(exponent - 1) - 1, a code means
    2^(E - bias) (1 + M / 2^mantissa), or 2^(1 - bias) (M / 2^mantissa) where E is 0: so do IEEE 754 and the OCP formats
    E2M1, E2M3, E3M2 (Microscaling Formats 1.0, 2023), E4M3 and E5M2 (8-bit Floating Point 1.0, 2023). E2M2 and E3M1
    follow the same rule; like the three of Microscaling they have neither infinity nor NaN.

    Args:
        exponent: bits of the exponent.
        mantissa: bits of the mantissa.
        onnx_type: the standard ONNX type that holds the codes.
        reserved: how many codes of either sign, the highest, are infinity or NaN in the standard. In a table they mean
            the largest number, so that codes from elsewhere saturate; encoding never writes them.
    """
    bits, bias = 1 + exponent + mantissa, 2 ** (exponent - 1) - 1
    codes = (min(code, 2 ** (bits - 1) - 1 - reserved) for code in range(2 ** (bits - 1)))
    positive = tuple(_value(code >> mantissa, code % 2**mantissa, mantissa, bias) for code in codes)
    name = "fp4" if (exponent, mantissa) == (2, 1) else f"fp{bits}-e{exponent}m{mantissa}"
    return TableFormat(name, bits, positive + tuple(-value for value in positive), onnx_type)


def _value(E: int, M: int, mantissa: int, bias: int) -> float:
    return math.ldexp((E > 0) + M / 2**mantissa, max(E, 1) - bias)
