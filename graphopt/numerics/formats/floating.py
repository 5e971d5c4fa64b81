"""Floating point of a few bits: a sign, then an exponent, then a mantissa."""

from __future__ import annotations

import math

import onnx_ir as ir

from graphopt.numerics.formats.table import TableFormat


def floating_point(
    exponent: int, mantissa: int, onnx_type: ir.DataType | None = None, *, specials: int = 0
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
        specials: how many codes of either sign, the highest, are infinity or NaN in the standard. In a table they mean
            the largest number, so that codes from elsewhere saturate; encoding never writes them.
    """
    bits, bias = 1 + exponent + mantissa, 2 ** (exponent - 1) - 1
    codes = (min(code, 2 ** (bits - 1) - 1 - specials) for code in range(2 ** (bits - 1)))
    positive = tuple(_value(code >> mantissa, code % 2**mantissa, mantissa, bias) for code in codes)
    name = "fp4" if (exponent, mantissa) == (2, 1) else f"fp{bits}-e{exponent}m{mantissa}"
    return TableFormat(name, bits, positive + tuple(-value for value in positive), onnx_type)


def _value(E: int, M: int, mantissa: int, bias: int) -> float:
    return math.ldexp((E > 0) + M / 2**mantissa, max(E, 1) - bias)


FP4 = floating_point(2, 1, ir.DataType.FLOAT4E2M1)
FP5_E2M2 = floating_point(2, 2)
FP5_E3M1 = floating_point(3, 1)
FP6_E2M3 = floating_point(2, 3)  # ONNX has types for these two from opset 28 on, which no runtime loads
FP6_E3M2 = floating_point(3, 2)
FP8_E4M3 = floating_point(4, 3, ir.DataType.FLOAT8E4M3FN, specials=1)
FP8_E5M2 = floating_point(5, 2, ir.DataType.FLOAT8E5M2, specials=4)
