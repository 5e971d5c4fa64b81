"""Formats of 4 bits whose values are quantiles of a distribution that weights have, so that all codes are as common."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from graphopt.numerics.formats.table import TableFormat


def normal_float4() -> TableFormat:
    """Return ``nf4``: 8 quantiles of the normal distribution above 0, 7 below, and 0, divided by the largest.

    Dettmers et al. 2023 (QLoRA), section 3 and appendix E: quantiles at equal steps of probability, from the offset
    (1 - 1/30 + 1 - 1/32) / 2 down to 1/2, for each side. The published numbers come from an offset of 0.9677083, with
    probabilities, quantiles and the division in float32; so do these, and all 16 are the same.
    """
    offset = float(np.float32(0.9677083))

    def side(count: int) -> list[np.float32]:
        probabilities = np.linspace(offset, 0.5, count + 1).astype(np.float32)[:-1]
        return [np.float32(NormalDist().inv_cdf(float(p))) for p in probabilities]

    quantiles = [-value for value in side(7)] + [np.float32(0)] + side(8)[::-1]
    return TableFormat("nf4", 4, tuple(float(value / quantiles[-1]) for value in quantiles))


def student_float4() -> TableFormat:
    """Return ``sf4``: as ``nf4``, with quantiles of Student's t distribution of 5 degrees of freedom.

    Dotzel et al. 2024, Learning from Students, section 4: the weights of most of the 30 networks they measured are of
    such a distribution, with heavier tails than the normal one.
    """
    offset = (1 - 1 / 30 + 1 - 1 / 32) / 2

    def side(count: int) -> list[float]:
        return [_student5_quantile(float(p)) for p in np.linspace(offset, 0.5, count + 1)[:-1]]

    quantiles = [-value for value in side(7)] + [0.0] + side(8)[::-1]
    return TableFormat("sf4", 4, tuple(float(np.float32(value / quantiles[-1])) for value in quantiles))


def _student5_quantile(probability: float) -> float:
    """Return x with P(T <= x) = ``probability`` for 5 degrees of freedom, found by halving.

    With tan(a) = x / sqrt(5) the distribution is 1/2 + (a + sin(a) cos(a) (1 + 2/3 cos(a)^2)) / pi (Abramowitz and
    Stegun, 26.7.3), which grows with a from -pi/2 to pi/2.
    """
    low, high = -math.pi / 2, math.pi / 2
    for _ in range(60):  # more than the bits of a double
        a = (low + high) / 2
        probability_of_a = 0.5 + (a + math.sin(a) * math.cos(a) * (1 + 2 / 3 * math.cos(a) ** 2)) / math.pi
        low, high = (a, high) if probability_of_a < probability else (low, a)
    return math.sqrt(5) * math.tan(low)


NF4 = normal_float4()
SF4 = student_float4()
