"""Sums over the tokens that a product reads."""

from __future__ import annotations

import dataclasses
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.quantization.statistics.squares import Doubles, Product, Squares, products_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# What :attr:`Moments.noise` means: numbers of a group, and codes.
_GROUP, _CODES = 32, 16

# Tokens whose squares are summed in float32 before they are added up in float64.
_TOKENS = 1024

# Tokens that are looked at together, so that what is computed of them stays in a core's cache.
_AT_ONCE = 16


@dataclass(frozen=True)
class Terms:
    """What a few tokens add to the sums.

    Attributes:
        tokens: how many they are.
        products: the blocks of x^T x; an iterator of them can be used once.
        total: the sum of x.
        largest: the largest magnitude.
        fourths: the sum of x^4, of 16 tokens each.
        errors: the squared error of 4 bits, likewise.
    """

    tokens: int
    products: Iterable[Product]
    total: Doubles
    largest: npt.NDArray[np.float32]
    fourths: tuple[float, ...]
    errors: tuple[float, ...]

    def copy(self) -> Terms:
        """Return terms that last and can be pickled."""
        return dataclasses.replace(self, products=[(key, product.copy()) for key, product in self.products])


def terms_of(inputs: npt.NDArray[Any]) -> Iterator[Terms]:
    """Yield what inputs [..., rows] add, in the order in which it is added; use each before the next."""
    tokens = inputs.reshape(-1, inputs.shape[-1])
    for start in range(0, len(tokens), _TOKENS):
        x = np.ascontiguousarray(tokens[start : start + _TOKENS], np.float32)
        largest, fourths, errors = np.zeros(x.shape[-1], np.float32), [], []
        for chunk in np.split(x, range(_AT_ONCE, len(x), _AT_ONCE)):
            np.maximum(largest, np.abs(chunk).max(axis=0), out=largest)
            square = np.square(chunk, dtype=np.float64).ravel()
            fourths.append(float(square @ square))
            errors.append(coarse_error(chunk))
        total = x.sum(axis=0, dtype=np.float64)
        yield Terms(len(x), products_of(x), total, largest, tuple(fourths), tuple(errors))


@dataclass
class Moments:
    """Running sums of inputs x [tokens, rows], float64 but for products of up to 1024 tokens, which are float32.

    Attributes:
        rows: numbers of a token.
        tokens: how many were added.
        spare: memory that other sums have released.
        squares: the sum of x^T x, [rows, rows].
        total: the sum of x, [rows].
        largest: the largest magnitude, [rows].
        fourth: the sum of x^4 over all of a token's numbers.
        coarse: the squared error of 4 bits in groups of 32 numbers of a token, with zero points, summed up likewise.
    """

    rows: int
    tokens: int = 0
    spare: InitVar[list[Doubles] | None] = None
    squares: Squares = field(init=False)
    total: Doubles = field(init=False)
    largest: Doubles = field(init=False)
    fourth: float = 0.0
    coarse: float = 0.0

    def __post_init__(self, spare: list[Doubles] | None) -> None:
        self.squares = Squares(self.rows, spare)
        self.total, self.largest = np.zeros(self.rows), np.zeros(self.rows)

    def add(self, inputs: npt.NDArray[Any]) -> None:
        """Add inputs [..., rows]; call it in one thread of linear algebra for the same bits on any number of cores."""
        for terms in terms_of(inputs):
            self.add_terms(terms)

    def add_terms(self, terms: Terms) -> None:
        """Add what :func:`terms_of` gives, one after the other: it adds up as if the inputs had been added here."""
        self.squares.add_products(terms.products)
        self.total += terms.total
        np.maximum(self.largest, terms.largest, out=self.largest)
        for fourth, coarse in zip(terms.fourths, terms.errors, strict=True):
            self.fourth += fourth
            self.coarse += coarse
        self.tokens += terms.tokens

    @property
    def kurtosis(self) -> float:
        """Mean of x^4 over the squared mean of x^2, over all numbers: 3 for normal ones, rows if one input is all."""
        second = float(self.squares.diagonal().sum())
        return self.fourth * self.tokens * self.rows / second**2 if second else 0.0

    @property
    def noise(self) -> float:
        """What 4 bits in groups of 32 add to x, as a share of the sum of x^2: 0.0065 for normal numbers."""
        second = float(self.squares.diagonal().sum())
        return self.coarse / second if second else 0.0


def coarse_error(x: npt.NDArray[np.float32]) -> float:
    """Return the squared error of x [tokens, rows] as 16 codes in groups of 32, whose range holds 0."""
    tokens, rows = x.shape
    numbers = np.zeros((tokens, -(-rows // _GROUP) * _GROUP), np.float32)
    numbers[:, :rows] = x
    # The numbers of a group one below the other: then every operation runs along all groups.
    groups = np.ascontiguousarray(numbers.reshape(-1, _GROUP).T)
    low, high = np.minimum(groups.min(0), 0), np.maximum(groups.max(0), 0)
    step = (high - low) / np.float32(_CODES - 1)
    step[step == 0] = 1
    zero = np.rint(-low / step)
    codes = groups / step
    np.rint(codes, out=codes)
    np.maximum(codes, -zero, out=codes)  # np.clip takes twice as long as both
    np.minimum(codes, _CODES - 1 - zero, out=codes)
    codes *= step
    codes -= groups
    error = codes.ravel().astype(np.float64)
    return float(error @ error)
