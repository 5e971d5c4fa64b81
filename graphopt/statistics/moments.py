"""Sums over the tokens that a product reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

# What :attr:`Moments.noise` means: numbers of a group, and codes.
_GROUP, _CODES = 32, 16

# Tokens whose squares are summed in float32 before they are added up in float64; rows of a block of such squares.
_TOKENS, _BLOCK = 1024, 512

# Tokens that are looked at together, so that what is computed of them stays in a core's cache.
_AT_ONCE = 16


@dataclass
class Moments:
    """Running sums of inputs x [tokens, rows], float64 but for products of up to 1024 tokens, which are float32.

    Attributes:
        rows: numbers of a token.
        tokens: how many were added.
        squares: the sum of x^T x, [rows, rows]: blocks of it on and above the diagonal, the others are 0.
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
            self._add_squares(x)
            self.total += x.sum(axis=0, dtype=np.float64)
            for few in np.split(x, range(_AT_ONCE, len(x), _AT_ONCE)):
                np.maximum(self.largest, np.abs(few).max(axis=0), out=self.largest)
                square = np.square(few, dtype=np.float64).ravel()
                self.fourth += float(square @ square)
                self.coarse += coarse_error(few)
        self.tokens += len(tokens)

    def _add_squares(self, x: npt.NDArray[np.float32]) -> None:
        """Add x^T x: half of it, through one small buffer, as memory that is new costs more than the products."""
        buffer = np.empty(_BLOCK**2, np.float32)
        for rows, columns in _blocks(self.rows):
            product = buffer[: (rows.stop - rows.start) * (columns.stop - columns.start)]
            product = product.reshape(rows.stop - rows.start, -1)
            np.matmul(x[:, rows].T, x[:, columns], out=product)
            self.squares[rows, columns] += product

    def hessian(self) -> npt.NDArray[np.float32]:
        """Return x^T x over the number of tokens, all of it, float32 [rows, rows]."""
        made = np.empty((self.rows, self.rows), np.float32)
        for rows, columns in _blocks(self.rows):
            made[rows, columns] = self.squares[rows, columns] / max(self.tokens, 1)
            made[columns, rows] = made[rows, columns].T
        return made

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


def _blocks(rows: int) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and columns of each block on or above the diagonal of a matrix [rows, rows]."""
    starts = [slice(start, min(start + _BLOCK, rows)) for start in range(0, rows, _BLOCK)]
    return itertools.combinations_with_replacement(starts, 2)


def coarse_error(x: npt.NDArray[np.float32]) -> float:
    """Return the squared error of x [tokens, rows] as 16 codes in groups of 32, whose range holds 0."""
    tokens, rows = x.shape
    padded = np.zeros((tokens, -(-rows // _GROUP) * _GROUP), np.float32)
    padded[:, :rows] = x
    # The numbers of a group one below the other: then every operation runs along all groups.
    groups = np.ascontiguousarray(padded.reshape(-1, _GROUP).T)
    low, high = np.minimum(groups.min(0), 0), np.maximum(groups.max(0), 0)
    step = (high - low) / np.float32(_CODES - 1)
    step[step == 0] = 1
    zero = np.rint(-low / step)
    codes = groups / step
    np.rint(codes, out=codes)
    np.clip(codes, -zero, _CODES - 1 - zero, out=codes)
    codes *= step
    codes -= groups
    error = codes.ravel().astype(np.float64)
    return float(error @ error)
