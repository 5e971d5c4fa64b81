"""Which tables are integers in disguise: a kernel may then multiply integers, exactly."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def integer_step(values: Sequence[float], limit: float) -> float | None:
    """Return the largest step of which all ``values`` are integer multiples of magnitude ``limit`` or less.

    Floating-point numbers are integers times powers of two, so this is a greatest common divisor of integers, exact:
    0.3, as stored, is no multiple of 0.1.

    Args:
        values: finite numbers.
        limit: the largest multiple, such as 127 for signed bytes.

    Returns:
        The step, 1 for a table of zeros, or ``None`` where there is none.

    Raises:
        ValueError: a number is not finite.
    """
    if not all(math.isfinite(value) for value in values):
        raise ValueError("a table of numbers that are not all finite has no step")
    ratios = [float(value).as_integer_ratio() for value in values]
    # denominators are powers of two, so the largest of them is a multiple of the others
    denominator = max((denominator_of_ratio for _, denominator_of_ratio in ratios), default=1)
    multiples = [abs(numerator) * (denominator // denominator_of_ratio) for numerator, denominator_of_ratio in ratios]
    divisor = math.gcd(*multiples)
    if divisor == 0:
        return 1.0
    return divisor / denominator if max(multiples) <= limit * divisor else None
