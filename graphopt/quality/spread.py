"""How far numbers spread: outliers of activations, before and after what a recipe rotates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from graphopt.ort.session import Array


class Spread(BaseModel):
    """The spread of activations.

    Attributes:
        kurtosis: the mean fourth power over the squared mean square: 3 for a normal distribution, more with outliers.
        largest: the largest magnitude, relative to the root of the mean square.
    """

    model_config = ConfigDict(extra="forbid")

    kurtosis: float
    largest: float


@dataclass
class Moments:
    """Sums of powers of numbers, piece by piece, in float64."""

    count: int = 0
    squares: float = 0.0
    fourths: float = 0.0
    largest: float = 0.0

    def add(self, numbers: Array) -> None:
        """Add some numbers, of any shape."""
        squares = np.square(numbers, dtype=np.float64)
        self.count += squares.size
        self.squares += float(squares.sum())
        self.fourths += float(np.square(squares).sum())
        self.largest = max(self.largest, float(np.sqrt(squares.max(initial=0.0))))

    def spread(self) -> Spread | None:
        """Return the spread; ``None`` where there are no numbers, or nothing but zeros, or NaN."""
        mean = self.squares / max(1, self.count)
        if not 0 < mean < np.inf:
            return None
        return Spread(kurtosis=self.fourths / self.count / mean**2, largest=self.largest / mean**0.5)
