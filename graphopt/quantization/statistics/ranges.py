"""How far the numbers of a tensor reach, and which range of them codes of few bits should have.

    minmax      from the least number to the largest
    percentile  between two percentiles: what lies beyond is cut off
    mse         the share of minmax whose codes lose the least, sum (x - decode(encode(x)))^2

The last two look at a sample of the numbers: so many of each run, evenly spaced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from graphopt.tasks.ports import Array

RangeMethod = Literal["minmax", "percentile", "mse"]
Doubles = npt.NDArray[np.float64]

_SAMPLE = 4096
_SHARES = np.linspace(0.2, 1, 41)


class TensorRanges(BaseModel):
    """The ranges of tensors of a model, as they were measured.

    Attributes:
        samples: how many texts or inputs the model ran on.
        digest: SHA-256 of them.
        is_random: whether they were random.
        ranges: the least and the largest number that codes reach, by the name of the tensor.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: int
    digest: str
    is_random: bool
    ranges: dict[str, tuple[float, float]]


@dataclass
class Observer:
    """Sees the numbers of one tensor, run by run.

    Attributes:
        low: the least number, at most 0: codes must have a zero.
        high: the largest number, at least 0.
        sample: some of the numbers.
    """

    low: float = 0.0
    high: float = 0.0
    sample: list[npt.NDArray[np.float32]] = field(default_factory=list)

    def add(self, array: Array) -> None:
        """Look at what one run made of the tensor.

        Raises:
            ValueError: a number is NaN or infinite.
        """
        numbers = np.asarray(array, np.float32).ravel()
        if not numbers.size:
            return
        low, high = float(numbers.min()), float(numbers.max())
        if not np.isfinite([low, high]).all():
            raise ValueError("a number is NaN or infinite")
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.sample.append(numbers[:: max(1, numbers.size // _SAMPLE)].copy())

    def range(self, method: RangeMethod, percentile: float, levels: int = 255) -> tuple[float, float]:
        """Return the least and the largest number that codes reach; one is at most 0, the other at least 0.

        Args:
            method: see the module.
            percentile: of the method of this name, in percent: 99.9 cuts off a thousandth at either end.
            levels: steps between the ends.
        """
        if method == "minmax" or not self.sample or self.low == self.high:
            return self.low, self.high
        numbers = np.concatenate(self.sample).astype(np.float64)
        if method == "percentile":
            low, high = np.percentile(numbers, [100 - percentile, percentile])
            return min(float(low), 0.0), max(float(high), 0.0)
        errors = [loss(numbers, self.low * share, self.high * share, levels) for share in _SHARES]
        share = float(_SHARES[int(np.argmin(errors))])
        return self.low * share, self.high * share


def step_and_zero(low: float, high: float, levels: int = 255) -> tuple[np.float32, int]:
    """Return the step between codes 0 to ``levels`` and the code of 0, for numbers from ``low`` to ``high``."""
    step = np.float32((high - low) / levels)
    if step < np.finfo(np.float32).tiny:  # all numbers are as good as 0
        step = np.float32(1)
    return step, int(np.clip(np.rint(-low / float(step)), 0, levels))


def loss(numbers: Doubles, low: float, high: float, levels: int = 255) -> float:
    """Return the mean squared difference of numbers from what their codes mean."""
    step, zero = step_and_zero(low, high, levels)
    codes = np.clip(np.rint(numbers / float(step)) + zero, 0, levels)
    return float(np.square((codes - zero) * float(step) - numbers).mean())
