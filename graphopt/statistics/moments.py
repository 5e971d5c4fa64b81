"""Sums over the tokens that a product reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

# What :attr:`Moments.noise` means: numbers of a group, and codes.
_GROUP, _CODES = 32, 16

# Tokens whose squares are summed in float32 before they are added up in float64.
_TOKENS = 1024


@dataclass
class Moments:
    """Running sums of inputs x [tokens, rows], float64 but for products of up to 1024 tokens, which are float32.

    Attributes:
        rows: numbers of a token.
        tokens: how many were added.
        squares: the sum of x^T x, [rows, rows].
        total: the sum of x, [rows].
        largest: the largest magnitude, [rows].
        fourth: the sum of x^4 over all of a token's numbers.
        coarse: the squared error of 4 bits in groups of 32 numbers of a token, with zero points, summed up likewise.
    """

    rows: int
    tokens: int = 0
    squares: npt.NDArray[np.float64] = field(init=False)
    total: npt.NDArray[np.float64] = field(init=False)
    largest: npt.NDArray[np.float64] = field(init=False)
    fourth: float = 0.0
    coarse: float = 0.0

    def __post_init__(self) -> None:
        self.squares = np.zeros((self.rows, self.rows))
        self.total, self.largest = np.zeros(self.rows), np.zeros(self.rows)

    def add(self, inputs: npt.NDArray[Any]) -> None:
        """Add inputs [..., rows]; call it in one thread of linear algebra for the same bits on any number of cores."""
        tokens = inputs.reshape(-1, self.rows)
        for start in range(0, len(tokens), _TOKENS):
            x = np.ascontiguousarray(tokens[start : start + _TOKENS], np.float32)
            # NumPy sees that both sides are one array and computes half of the product.
            self.squares += x.T @ x
            self.total += x.sum(axis=0, dtype=np.float64)
            np.maximum(self.largest, np.abs(x).max(axis=0), out=self.largest)
            self.fourth += float(np.square(np.square(x, dtype=np.float64)).sum())
            self.coarse += coarse_error(x)
        self.tokens += len(tokens)

    @property
    def kurtosis(self) -> float:
        """Mean of x^4 over the squared mean of x^2, over all numbers: 3 for normal ones, rows if one input is all."""
        second = float(np.trace(self.squares))
        return self.fourth * self.tokens * self.rows / second**2 if second else 0.0

    @property
    def noise(self) -> float:
        """What 4 bits in groups of 32 add to x, as a share of the sum of x^2: 0.0065 for normal numbers."""
        second = float(np.trace(self.squares))
        return self.coarse / second if second else 0.0


def coarse_error(x: npt.NDArray[np.float32]) -> float:
    """Return the squared error of x [tokens, rows] as 16 codes in groups of 32, whose range holds 0."""
    tokens, rows = x.shape
    groups = np.zeros((tokens, -(-rows // _GROUP), _GROUP), np.float32)
    groups.reshape(tokens, -1)[:, :rows] = x
    low, high = np.minimum(groups.min(-1, keepdims=True), 0), np.maximum(groups.max(-1, keepdims=True), 0)
    step = (high - low) / np.float32(_CODES - 1)
    step[step == 0] = 1
    zero = np.rint(-low / step)
    codes = np.clip(np.rint(groups / step), -zero, _CODES - 1 - zero)
    codes *= step
    codes -= groups
    return float(np.square(codes, dtype=np.float64).sum())
