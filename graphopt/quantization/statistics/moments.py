"""Sums over the tokens that a product reads."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.errors import InputError
from graphopt.quantization.statistics.squares import Doubles, Product, Squares, products_of
from graphopt.runtime_ops.library import library_function, library_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from graphopt.quantization.statistics.integers import Integers

# What :attr:`Moments.noise` means: numbers of a group, and codes.
_GROUP, _CODES = 32, 16

# Of `graphopt_add_moments`, see `cpu/entry.cc`.
_ARGUMENTS = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, *[ctypes.c_void_p] * 4)

# Tokens whose squares are summed in float32 before they are added up in float64.
_TOKENS = 1024


@dataclass(frozen=True)
class Terms:
    """What a few tokens add to the sums.

    Attributes:
        tokens: how many they are.
        products: the blocks of x^T x; an iterator of them can be used once.
        total: the sum of x.
        largest: the largest magnitude.
        fourth: the sum of x^4.
        error: the squared error of 4 bits.
    """

    tokens: int
    products: Iterable[Product]
    total: Doubles
    largest: npt.NDArray[np.float32]
    fourth: float
    error: float

    def copy(self) -> Terms:
        """Return terms that last and can be pickled."""
        return dataclasses.replace(self, products=[(key, product.copy()) for key, product in self.products])


def terms_of(inputs: npt.NDArray[Any]) -> Iterator[Terms]:
    """Yield what inputs [..., rows] add, in the order in which it is added; use each before the next."""
    tokens = inputs.reshape(-1, inputs.shape[-1])
    for start in range(0, len(tokens), _TOKENS):
        x = np.ascontiguousarray(tokens[start : start + _TOKENS], np.float32)
        total, largest, fourth, error = sums_of(x)
        yield Terms(len(x), products_of(x), total, largest, fourth, error)


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
        self._add_vectors(terms)

    def add_rounded(self, x: npt.NDArray[np.float32], integers: Integers) -> None:
        """Add x [tokens, rows], contiguous, up to 1024 tokens, as integers of 11 bits, or as floats if they need it.

        Args:
            x: the inputs.
            integers: its columns.
        """
        if integers.has_noise:
            self.add(x)
        else:
            self._add_vectors(Terms(len(x), [], *sums_of(x)))
            self.squares.add_integers(integers)

    def _add_vectors(self, terms: Terms) -> None:
        self.total += terms.total
        np.maximum(self.largest, terms.largest, out=self.largest)
        self.fourth += terms.fourth
        self.coarse += terms.error
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


def sums_of(x: npt.NDArray[np.float32]) -> tuple[Doubles, npt.NDArray[np.float32], float, float]:
    """Return sums over x [tokens, rows] by the library where it was built, or the same numbers by NumPy.

    Returns:
        The sum of x over tokens, float64 [rows]; the largest magnitude, [rows]; the sum of x^4; and the squared error
        of x as 16 codes in groups of 32 numbers of a token, whose range holds 0.

    Raises:
        InputError: GRAPHOPT_OPS_ISA names what this machine does not have.
    """
    rows = x.shape[1]
    total, largest, lane_sums = np.zeros(rows), np.zeros(rows, np.float32), np.zeros((2, _GROUP))
    path = library_path()
    function = None if path is None else library_function(str(path), "graphopt_add_moments", *_ARGUMENTS)
    if function is None:
        _add_sums(x, total, largest, lane_sums)
    elif not function(x.ctypes.data, *x.shape, *(array.ctypes.data for array in (total, largest, *lane_sums))):
        raise InputError("GRAPHOPT_OPS_ISA names instructions that this machine does not have")
    fourth, error = (math.fsum(row) for row in lane_sums)
    return total, largest, fourth, error


def _add_sums(x: npt.NDArray[np.float32], total: Doubles, largest: npt.NDArray[np.float32], lane_sums: Doubles) -> None:
    """Add what ``cpu/kernels_moments.cc`` adds: token after token, and of groups each of the 32 lanes by itself."""
    for token in x:
        total += token
        np.maximum(largest, np.abs(token), out=largest)
        numbers = np.zeros((-(-len(token) // _GROUP), _GROUP), np.float32)
        numbers.reshape(-1)[: len(token)] = token
        low, high = np.minimum(numbers.min(1), 0)[:, None], np.maximum(numbers.max(1), 0)[:, None]
        step = (high - low) / np.float32(_CODES - 1)
        step[step == 0] = 1
        zero = np.rint(-low / step)
        codes = np.clip(np.rint(numbers / step), -zero, _CODES - 1 - zero)
        for square, error in zip(
            np.square(numbers, dtype=np.float64), np.square(codes * step - numbers, dtype=np.float64), strict=True
        ):
            lane_sums[0] += np.square(square)
            lane_sums[1] += error
