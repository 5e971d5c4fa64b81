"""What a function of rows computes, if it is a norm: found by its values.

    y = g * (x - m) / sqrt(mean((x - m)^2) + e) + b           m = mean(x): LayerNormalization; m = 0: RMSNormalization

(Ba et al. 2016, "Layer Normalization", equations 3 and 4; Zhang and Sennrich 2019, "Root Mean Square Layer
Normalization", equation 4.) The function is run in float64, where rounding hides nothing: b is the even part of y,
since the rest changes its sign with x; m is 0 if a constant row gives anything but b; g is what large rows give, in
which e vanishes; e is what tiny rows give. Then all rows must be what the definition says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from graphopt.graph.diagnostics import Fact, Rule

NOT_FINITE = Rule("canonicalize.norm-not-finite", "rows of numbers that are not zero come out as NaN or infinite")
IGNORES = Rule("canonicalize.norm-ignores", "what it makes does not depend on the row")
DIFFERS = Rule(
    "canonicalize.norm-differs",
    "it is no {kind}: with epsilon {epsilon}, a row of size {size} gives {found} where {expected} is due",
)

Rows = npt.NDArray[Any]
Evaluate = Callable[[Rows], Rows | Fact]

Kind = Literal["RMSNormalization", "LayerNormalization"]

_LARGE = 1e9
# From far below any epsilon to far above any activation: what is cut off at some size shows at the next.
SCALES = (1e-20, 1e-15, 1e-12, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 1e2, 1e4, 1e6, _LARGE, 1e18)
# In float64 a sum of n numbers is off by n 2^-53 of itself, 2e-12 for 16384; constants such as 1/n that the graph
# holds in float32 are constants of the same function, and go into g and e.
_TOLERANCE = 1e-10
_ROUNDING = 1e-14
_CONSTANT_ROWS = (1e-3, 1.0, 50.0)


@dataclass(frozen=True)
class Norm:
    """A norm, its numbers in float64: ``gain`` and ``bias`` [n]; ``bias`` is ``None`` where it is 0."""

    kind: Kind
    gain: Rows
    bias: Rows | None
    epsilon: float

    def apply(self, x: Rows) -> Rows:
        """Return the norm of the rows ``x`` [rows, n], computed in float64 by the definition."""
        deviations = self.center(x)
        with np.errstate(invalid="ignore"):
            unit_rows = deviations / np.sqrt((deviations**2).mean(-1, keepdims=True) + self.epsilon)
        norm: Rows = self.gain * unit_rows + (0.0 if self.bias is None else self.bias)
        return norm

    def center(self, x: Rows) -> Rows:
        """Return ``x``, less the mean of each row for a LayerNormalization."""
        rows = np.asarray(x, np.float64)
        return rows - rows.mean(-1, keepdims=True) if self.kind == "LayerNormalization" else rows

    def bound(self, x: Rows, unit: float, roundings: int) -> Rows:
        """Return how far a sound computation of the norm of ``x`` in floating point may be from :meth:`apply`.

        A sum of n numbers is off by n u times the sum of their magnitudes, u the unit roundoff (Higham 2002, "Accuracy
        and Stability of Numerical Algorithms", section 4.2). So x - m is off by d = u (|x| + (n + 1) mean|x|), the root
        r of its mean square by at most max(d) + n u r, and a quotient q = (x - m) / r by
        d / r + |q| (max(d) / r + n u), besides u for each further operation and for the bias.

        Args:
            x: the rows [rows, n].
            unit: unit roundoff of the type that is computed in.
            roundings: elementwise operations on the way.
        """
        n, size = x.shape[-1], np.abs(np.asarray(x, np.float64))
        deviations = self.center(x)
        root = np.sqrt((deviations**2).mean(-1, keepdims=True) + self.epsilon)
        error = unit * (size + (n + 1) * size.mean(-1, keepdims=True))
        if self.kind == "RMSNormalization":
            error = unit * size
        bias = 0.0 if self.bias is None else np.abs(self.bias)
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient = np.abs(deviations) / root
            relative = (n + roundings) * unit + error.max(-1, keepdims=True) / root
            norm: Rows = np.abs(self.gain) * (error / root + quotient * relative) + 2 * unit * bias
        return norm


def understand(evaluate: Evaluate, n: int) -> Norm | Fact:
    """Return the norm that ``evaluate`` computes, or why it computes none.

    Args:
        evaluate: maps rows [rows, n], float64, to as many, or returns why it cannot.
        n: the size of a row.
    """
    random = np.random.default_rng(0)
    unit = random.standard_normal((4, n))
    unit[3] += 3.0  # so that its mean is large beside its deviation
    rows = np.concatenate([scale * unit for scale in SCALES])
    flat = np.concatenate([np.full((1, n), number) for number in _CONSTANT_ROWS])
    zero = np.zeros((1, n))
    x = np.concatenate([rows, -rows, flat, zero])
    y = evaluate(x)
    if isinstance(y, Fact):
        return y
    first = len(unit) * SCALES.index(_LARGE)
    large = slice(first, first + len(unit))
    if not np.isfinite(y[: 2 * len(rows)]).all():
        return NOT_FINITE()
    mirrored_rows = y[len(rows) : 2 * len(rows)]
    bias = (y[large] + mirrored_rows[large]).mean(0) / 2
    spread = float(np.abs(y[large] - bias).max())
    if not spread:
        return IGNORES()
    bias = bias if np.abs(bias).max() > _TOLERANCE * spread else np.zeros(n)
    constant = np.abs(y[2 * len(rows) : 2 * len(rows) + len(flat)] - bias).max() <= 1e-6 * spread
    kind: Kind = "LayerNormalization" if constant else "RMSNormalization"
    plain = Norm(kind, np.ones(n), None, 0.0)
    ratio = plain.apply(x[large])
    gain = ((y[large] - bias) * ratio).sum(0) / (ratio**2).sum(0)
    firsts = slice(0, len(rows), len(unit))
    epsilon = _epsilon(plain.center(x[firsts]), y[firsts], gain, bias)
    norm = Norm(kind, gain, bias if bias.any() else None, epsilon)
    return _why_not(norm, x, y) or norm


def _epsilon(deviations: Rows, y: Rows, gain: Rows, bias: Rows) -> float:
    """Return e in y = g d / sqrt(mean(d^2) + e) + b, from the row d that determines it most precisely.

    A row with root r = sqrt(mean(d^2) + e) gives e as r^2 - mean(d^2), which is off by r^2 times the relative rounding
    of y - b: large rows have a large r, and of tiny ones b leaves little.
    """
    best, finest = 0.0, np.inf
    for row, out in zip(deviations, y, strict=True):
        gained_rows, square = gain * row, float((row**2).mean())
        slope = float((gained_rows * (out - bias)).sum())
        if slope <= 0:
            continue
        root = float((gained_rows**2).sum()) / slope
        share = 1 + float(np.abs(bias).sum() / np.abs(out - bias).sum())
        error = _ROUNDING * share * root**2
        if error < finest:
            best, finest = root**2 - square, error
    return best if best > finest else 0.0


def _why_not(norm: Norm, x: Rows, y: Rows) -> Fact | None:
    """Return where ``y`` is not ``norm`` of ``x``, or ``None``."""
    expected_rows = norm.apply(x)
    bound = norm.bound(x, _TOLERANCE / x.shape[-1], x.shape[-1])
    with np.errstate(invalid="ignore"):
        error = np.abs(y - expected_rows)
    wrong = ~((error <= bound) | (np.isnan(y) & np.isnan(expected_rows)))
    if not wrong.any():
        return None
    row = int(np.argmax(wrong.any(-1)))
    column = int(np.argmax(wrong[row]))
    return DIFFERS(
        kind=norm.kind,
        epsilon=f"{norm.epsilon:.3g}",
        size=f"{np.abs(x[row]).max():.0e}",
        found=f"{y[row, column]:.6g}",
        expected=f"{expected_rows[row, column]:.6g}",
    )
