"""Formats whose values err least for weights that are normally distributed, and are integers for the kernels."""

from __future__ import annotations

from graphopt.numerics.formats.table import TableFormat

_STEP = 128

# What Lloyd's algorithm ends with, in steps of 1/128; tests/numerics/formats/test_nonlinear.py runs it from there.
_VALUES = {
    3: (-113, -64, -30, 0, 23, 49, 81, 127),
    4: (-119, -89, -68, -52, -38, -25, -12, 0, 11, 23, 35, 47, 61, 77, 98, 127),
    5: (
        *(-125, -106, -93, -82, -73, -65, -57, -50, -43, -37, -30, -24, -18, -12, -6, 0),
        *(6, 12, 18, 23, 29, 36, 42, 48, 55, 62, 69, 77, 86, 97, 110, 127),
    ),
}


def nonlinear(bits: int) -> TableFormat:
    """Return ``nl3``, ``nl4`` or ``nl5``: the table of least squared error for normal weights, with a 0.

    llama.cpp's IQ4_NL has such a table of 4 bits, without a 0. Weights in groups of 64 that share a scale, each scale
    the best for its group, are given to the nearest value, and each value becomes the mean of what was given to it,
    weighted by the squared scale (Lloyd 1982; Max 1960), again and again; 0 stays. Then values are rounded to multiples
    of 1/128, which costs 0.1 to 1% more error, so that kernels multiply bytes, where quantiles as in ``nf4`` take two.

    Raises:
        KeyError: there is no such table.
    """
    return TableFormat(f"nl{bits}", bits, tuple(value / _STEP for value in _VALUES[bits]))


NL3, NL4, NL5 = (nonlinear(bits) for bits in _VALUES)
