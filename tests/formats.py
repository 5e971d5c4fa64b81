"""A format that is no table: what a code means depends on its right neighbour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from graphopt.numerics.formats import Format, TableFormat


@dataclass(frozen=True)
class PairFormat(Format):
    """A weight is A[its code] + B[the code to its right], at the end of a row A alone; Viterbi finds the best codes."""

    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def joint_columns(self) -> None:
        return None

    @property
    def limit(self) -> float:
        """About where the smaller of the two ends of the sums lies."""
        return min(max(self.first) + max(self.second), -min(self.first) - min(self.second))

    @property
    def operands(self) -> Mapping[str, np.ndarray]:
        return {"first": np.array(self.first, np.float32), "second": np.array(self.second, np.float32)}

    def encode(self, numbers, scales=1.0, zero_points=None, importance=None):
        assert zero_points is None
        shape = np.shape(numbers)
        rows = np.reshape(numbers, (-1, shape[-1]))
        scales = np.broadcast_to(scales, shape).reshape(rows.shape)
        counts = np.broadcast_to(1.0 if importance is None else importance, shape).reshape(rows.shape)
        sums = np.array(self.first)[:, None] + np.array(self.second)
        costs, previous = np.zeros((len(rows), len(self.first))), []
        for column in range(shape[-1] - 1):
            errors = rows[:, column, None, None] - sums * scales[:, column, None, None]
            paths = costs[:, :, None] + counts[:, column, None, None] * errors**2
            previous.append(paths.argmin(1))
            costs = paths.min(1)
        costs = costs + counts[:, -1:] * (rows[:, -1:] - np.array(self.first) * scales[:, -1:]) ** 2
        codes = np.empty(rows.shape, np.uint8)
        codes[:, -1] = costs.argmin(1)
        for column in range(shape[-1] - 2, -1, -1):
            codes[:, column] = previous[column][np.arange(len(rows)), codes[:, column + 1]]
        return codes.reshape(shape)

    def decode(self, codes, scales=None, zero_points=None):
        assert zero_points is None
        values = np.array(self.first)[codes]
        values[..., :-1] += np.array(self.second)[codes[..., 1:]]
        return values if scales is None else values * scales


# Lloyd's 4 values for normal weights, and two tables found by Lloyd's algorithm over Viterbi's paths.
SINGLES = TableFormat("singles", 2, tuple(float(np.float32(value)) for value in (-1.51, -0.4528, 0.4528, 1.51)))
PAIRS = PairFormat("pairs", 2, (-1.285, -0.531, -0.176, 0.483), (0.106, 1.599, -0.737, 0.727))
