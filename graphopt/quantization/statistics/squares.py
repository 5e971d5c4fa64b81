"""The sum of x^T x over tokens: half of it, in blocks whose memory goes on to the next sum."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Doubles = npt.NDArray[np.float64]

Product = tuple[tuple[int, int], npt.NDArray[np.float32]]
"""A block of x^T x: its first row and column, and its numbers."""

# Rows of a block.
_BLOCK = 512


class Squares:
    """The sum of x^T x for x [tokens, rows], float64, as its blocks on and above the diagonal.

    A product of 512 columns with 512 others stays in a core's cache until it is added. Nothing of the size of
    [rows, rows] is made for it: pages of memory that is new take the system longer than the product takes.

    Args:
        rows: numbers of a token.
        spare: blocks that another sum has released; they are taken from there.
    """

    def __init__(self, rows: int, spare: list[Doubles] | None = None) -> None:
        self._rows, self._spare = rows, [] if spare is None else spare
        self._blocks: dict[tuple[int, int], Doubles] = {}

    def add(self, x: npt.NDArray[np.float32]) -> None:
        """Add x^T x, computed in float32; call it in one thread of linear algebra for the same bits on any machine."""
        self.add_products(products_of(x))

    def add_products(self, products: Iterable[Product]) -> None:
        """Add what :func:`products_of` gives."""
        for key, product in products:
            if key in self._blocks:
                self._blocks[key] += product
            else:
                self._blocks[key] = self._allocate(product.shape)
                self._blocks[key][...] = product

    def diagonal(self) -> Doubles:
        """Return the sum of x^2 for each row."""
        sums = np.zeros(self._rows)
        for (row, column), block in self._blocks.items():
            if row == column:
                sums[row : row + len(block)] = np.diagonal(block)
        return sums

    def mean_over(self, tokens: int) -> npt.NDArray[np.float32]:
        """Return all of the sum, divided by a number of tokens, float32 [rows, rows]."""
        mean = np.zeros((self._rows, self._rows), np.float32)
        for (row, column), block in self._blocks.items():
            rows, columns = (slice(start, start + size) for start, size in zip((row, column), block.shape, strict=True))
            np.divide(block, tokens, out=mean[rows, columns], casting="same_kind")
            mean[columns, rows] = mean[rows, columns].T
        return mean

    def release(self) -> None:
        """Give the memory away; the sum is 0 then."""
        self._spare += [block for block in self._blocks.values() if block.shape == (_BLOCK, _BLOCK)]
        self._blocks.clear()

    def _allocate(self, shape: tuple[int, ...]) -> Doubles:
        return self._spare.pop() if shape == (_BLOCK, _BLOCK) and self._spare else np.empty(shape)


def products_of(x: npt.NDArray[np.float32]) -> Iterator[Product]:
    """Yield the blocks of x^T x on and above the diagonal, in float32; each is overwritten by the next."""
    size = x.shape[-1]
    buffer = np.empty(min(_BLOCK, size) ** 2, np.float32)
    slices = [slice(start, min(start + _BLOCK, size)) for start in range(0, size, _BLOCK)]
    for rows, columns in itertools.combinations_with_replacement(slices, 2):
        shape = rows.stop - rows.start, columns.stop - columns.start
        product = buffer[: shape[0] * shape[1]].reshape(shape)
        # NumPy sees where both sides are one array, and computes half of the product.
        np.matmul(x[:, rows].T, x[:, columns], out=product)
        yield (rows.start, columns.start), product
