"""Formats whose values err least for weights that are normally distributed, and are integers for the kernels."""

from __future__ import annotations

from graphopt.numerics.formats.table import TableFormat

_STEP = 64

# What Lloyd's algorithm ends with, in steps of 1/64; then values moved by one step as long as that erred less.
# tests/numerics/formats/test_nonlinear.py takes one round of Lloyd's algorithm from there.
_VALUES = {
    3: (-58, -33, -15, 0, 12, 25, 41, 65),
    4: (-58, -44, -34, -26, -19, -12, -6, 0, 5, 11, 17, 23, 30, 38, 48, 62),
    5: (
        *(-62, -54, -48, -42, -37, -33, -29, -25, -21, -18, -15, -12, -9, -6, -3, 0),
        *(3, 6, 9, 12, 15, 18, 21, 24, 27, 31, 35, 39, 44, 50, 57, 65),
    ),
}


def nonlinear(bits: int) -> TableFormat:
    """Return ``nl3``, ``nl4`` or ``nl5``: the table of least squared error for normal weights, with a 0.

    llama.cpp's IQ4_NL has such a table of 4 bits, without a 0. Weights in groups of 64 that share a scale, each scale
    the best for its group, are given to the nearest value, and each value becomes the mean of what was given to it,
    weighted by the squared scale (Lloyd 1982; Max 1960), again and again; 0 stays. Then values are rounded to multiples
    of 1/64 that span 128 steps at most: kernels multiply bytes, where quantiles as in ``nf4`` take two, and with AVX2
    the products of two such bytes fit 16 bits. Beside steps of 1/128 ``nl4`` errs 0.15% more, the others no more.

    Raises:
        KeyError: there is no such table.
    """
    return TableFormat(f"nl{bits}", bits, tuple(value / _STEP for value in _VALUES[bits]))


NL3, NL4, NL5 = (nonlinear(bits) for bits in _VALUES)
