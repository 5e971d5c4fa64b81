"""The sum of x^T x over tokens: half of it, in blocks whose memory goes on to the next sum."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphopt.quantization.statistics.integers import add_products
from graphopt.quantization.statistics.symmetric import PANEL, panels
from graphopt.util.processors import run_in_threads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from graphopt.quantization.statistics.integers import Integers

Doubles = npt.NDArray[np.float64]

Product = tuple[tuple[int, int], npt.NDArray[np.float32]]
"""A block of x^T x: its first row and column, and its numbers."""


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
        self._is_half = False

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

    def add_integers(self, vectors: Integers) -> None:
        """Add x^T x for the columns of x as integers; threads share the blocks."""
        self._is_half = True
        pairs = list(itertools.combinations_with_replacement(panels(self._rows), 2))
        for rows, columns in pairs:
            key = rows.start, columns.start
            if key not in self._blocks:
                self._blocks[key] = self._allocate((rows.stop - rows.start, columns.stop - columns.start))
                self._blocks[key][...] = 0

        def add_block(pair: tuple[slice, slice]) -> None:
            rows, columns = pair
            block = self._blocks[rows.start, columns.start]
            add_products(vectors[rows], vectors[columns], block, half=rows == columns)

        run_in_threads(add_block, pairs)

    def diagonal(self) -> Doubles:
        """Return the sum of x^2 for each row."""
        sums = np.zeros(self._rows)
        for (row, column), block in self._blocks.items():
            if row == column:
                sums[row : row + len(block)] = np.diagonal(block)
        return sums

    def panels_over(self, tokens: int) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the sum, divided by a number of tokens, in panels as :class:`Symmetric` has them."""
        for panel in panels(self._rows):
            mean = np.zeros((panel.stop - panel.start, self._rows - panel.start), np.float32)
            for column in range(panel.start, self._rows, PANEL):
                block = self._blocks.get((panel.start, column))
                if block is not None:
                    if self._is_half and column == panel.start:
                        block = np.triu(block) + np.triu(block, 1).T
                    columns = slice(column - panel.start, column - panel.start + block.shape[1])
                    np.divide(block, tokens, out=mean[:, columns], casting="same_kind")
            yield mean

    def release(self) -> None:
        """Give the memory away; the sum is 0 then."""
        self._spare += [block for block in self._blocks.values() if block.shape == (PANEL, PANEL)]
        self._blocks.clear()

    def _allocate(self, shape: tuple[int, ...]) -> Doubles:
        return self._spare.pop() if shape == (PANEL, PANEL) and self._spare else np.empty(shape)


def products_of(x: npt.NDArray[np.float32]) -> Iterator[Product]:
    """Yield the blocks of x^T x on and above the diagonal, in float32; each is overwritten by the next."""
    size = x.shape[-1]
    buffer = np.empty(min(PANEL, size) ** 2, np.float32)
    for rows, columns in itertools.combinations_with_replacement(panels(size), 2):
        shape = rows.stop - rows.start, columns.stop - columns.start
        product = buffer[: shape[0] * shape[1]].reshape(shape)
        # NumPy sees where both sides are one array, and computes half of the product.
        np.matmul(x[:, rows].T, x[:, columns], out=product)
        yield (rows.start, columns.start), product
