"""Products of numbers as integers of 11 bits: faster than those of floats on AVX2, and exact.

Sums that matrices of a few bits are chosen by are not worth 24 bits: numbers of a vector [length] become integers up to
1023 with one scale, and their errors have a root mean square of 1/3500 of its largest number. Sums of integers are
exact, so they have the same bits on any machine, with the library or without, and with any number of threads.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.errors import InputError
from graphopt.quantization.rounding.single_thread import one_thread
from graphopt.runtime_ops.library import library_function, library_path
from graphopt.util.processors import run_in_threads

if TYPE_CHECKING:
    from collections.abc import Sequence

Doubles = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]

PANEL = 64
"""Vectors whose numbers lie together."""

# The largest integer, and the least of a vector's largest magnitudes that is not taken for 0.
_LARGEST, _SMALLEST = np.float32(1023), np.float32(1e-30)

# Bytes of a line of the first cache. Where numbers begin with one, no load of a kernel reads two, as it would of large
# arrays of NumPy, which begin in the middle.
_LINE = 64

# Vectors that a thread multiplies; and the share of a square that rounding may add. Matrices of 3 bits add 2%.
_ROWS, _NOISE = 256, 1e-3


class _Work(ctypes.Structure):
    """``IntegersWork`` of ``cpu/integers.h``."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("vectors", ctypes.c_size_t),
        ("length", ctypes.c_size_t),
        ("vector_stride", ctypes.c_size_t),
        ("number_stride", ctypes.c_size_t),
        ("integers", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("squares", ctypes.c_void_p),
    ]


class _Products(ctypes.Structure):
    """``IntegerProductsWork`` of ``cpu/integers.h``."""

    _fields_ = [
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("left_scales", ctypes.c_void_p),
        ("right_scales", ctypes.c_void_p),
        ("rows", ctypes.c_size_t),
        ("columns", ctypes.c_size_t),
        ("pairs", ctypes.c_size_t),
        ("sums", ctypes.c_void_p),
        ("products", ctypes.c_void_p),
        ("stride", ctypes.c_size_t),
        ("half", ctypes.c_uint8),
    ]


@dataclass(frozen=True)
class Integers:
    """Vectors as integers.

    Attributes:
        numbers: int16 [panels, pairs, 64, 2]: pairs of neighbouring numbers of 64 vectors; zeros behind the last ones.
        scales: what an integer of each vector means, float32 [vectors]; NaN where a number is NaN or infinite.
        squares: the sum of the squares of each vector's integers, uint64 [vectors].
        length: numbers of a vector.
    """

    numbers: npt.NDArray[np.int16]
    scales: Singles
    squares: npt.NDArray[np.uint64]
    length: int

    def __getitem__(self, vectors: slice) -> Integers:
        """Return some vectors, from the first one of a panel on."""
        begin, end = vectors.start // PANEL, -(-vectors.stop // PANEL)
        return Integers(self.numbers[begin:end], self.scales[vectors], self.squares[vectors], self.length)

    def __len__(self) -> int:
        return len(self.scales)

    @cached_property
    def has_noise(self) -> bool:
        """Whether rounding adds more than 0.1% to the squares of the vectors, on their average.

        It does where the largest number of a vector is about a hundred times as large as the others, or not finite: an
        integer is off by 1/12 in the mean of squares. All terms are exact, so it is the same on any machine.
        """
        noise = np.where(self.squares == 0, 0, self.length / 12)
        shares = np.where(np.isnan(self.scales), np.inf, noise / np.maximum(self.squares, 1))
        return not shares.mean() <= _NOISE

    def whole(self) -> Doubles:
        """Return the integers as float64 [vectors, length, made even]."""
        panels, pairs = self.numbers.shape[:2]
        vectors = self.numbers.transpose(0, 2, 1, 3).reshape(panels * PANEL, 2 * pairs)
        return vectors[: len(self)].astype(np.float64)


def integers_of(x: Singles, axis: int) -> Integers:
    """Return the vectors along an axis of x [rows, columns] as integers.

    Args:
        x: contiguous.
        axis: 0 for a vector of each column, 1 for one of each row.

    Raises:
        InputError: GRAPHOPT_OPS_ISA names what this machine does not have.
    """
    vectors, length = x.shape[1 - axis], x.shape[axis]
    numbers = _new_numbers(-(-vectors // PANEL), (length + 1) // 2)
    scales, squares = np.empty(vectors, np.float32), np.empty(vectors, np.uint64)
    convert = _function("graphopt_to_integers")
    if convert is None:
        return _integers_of(x if axis else x.T, numbers, scales)
    strides = (1, x.shape[1]) if axis == 0 else (x.shape[1], 1)
    results = (array.ctypes.data for array in (numbers, scales, squares))
    _call(convert, _Work(x.ctypes.data, vectors, length, *strides, *results))
    return Integers(numbers, scales, squares, length)


def integers_of_columns(arrays: Sequence[Singles]) -> list[Integers]:
    """Return the columns of arrays [rows, columns] of one shape as integers; threads share them.

    Raises:
        InputError: GRAPHOPT_OPS_ISA names what this machine does not have.
    """
    results: dict[int, Integers] = {}

    def convert(index: int) -> None:
        results[index] = integers_of(arrays[index], 0)

    run_in_threads(convert, range(len(arrays)))
    return [results[index] for index in range(len(arrays))]


def add_products(row_vectors: Integers, column_vectors: Integers, sums: Doubles, *, half: bool = False) -> None:
    """Add the product of each vector of one side with each of the other to ``sums`` [vectors, vectors].

    Args:
        row_vectors: of the rows.
        column_vectors: of the columns.
        sums: rows are contiguous.
        half: leave out panels below the diagonal.

    Raises:
        InputError: GRAPHOPT_OPS_ISA names what this machine does not have.
    """
    function = _function("graphopt_multiply_integers")
    if function is None:
        products = _products_of(row_vectors, column_vectors)
        if half:
            products[_below_diagonal(products.shape)] = 0
        sums += products
    else:
        _call(function, _products_work(row_vectors, column_vectors, sums.ctypes.data, None, sums.strides[0] // 8, half))


def products_of(row_vectors: Integers, column_vectors: Integers, products: Singles) -> None:
    """Write the product of each vector of one side with each of the other, float32 [vectors, vectors].

    Args:
        row_vectors: of the rows.
        column_vectors: of the columns.
        products: rows are contiguous.

    Raises:
        InputError: GRAPHOPT_OPS_ISA names what this machine does not have.
    """
    function = _function("graphopt_multiply_integers")
    if function is None:
        products[...] = _products_of(row_vectors, column_vectors)
    else:
        _call(
            function,
            _products_work(
                row_vectors, column_vectors, None, products.ctypes.data, products.strides[0] // 4, half=False
            ),
        )


class Matrix:
    """A matrix [rows, columns] that many inputs are multiplied by.

    Args:
        numbers: the matrix, float32.
    """

    def __init__(self, numbers: Singles) -> None:
        self.numbers = np.ascontiguousarray(numbers, np.float32)
        self.integers = integers_of(self.numbers, 0)


def multiply(x: Singles, matrices: Sequence[Matrix]) -> list[Singles]:
    """Return x [..., rows] times each matrix, float32 [..., columns], with a scale for each vector of x.

    Where one number of a vector is so large that the others would suffer, it is a product of floats.

    Raises:
        InputError: GRAPHOPT_OPS_ISA names what this machine does not have.
    """
    vectors = np.ascontiguousarray(x.reshape(-1, x.shape[-1]), np.float32)
    products = [np.empty((len(vectors), matrix.numbers.shape[1]), np.float32) for matrix in matrices]

    def multiply_part(rows: slice) -> None:
        row_vectors = integers_of(vectors[rows], 1)
        for matrix, product in zip(matrices, products, strict=True):
            if matrix.integers.has_noise or row_vectors.has_noise:
                with one_thread():
                    np.matmul(vectors[rows], matrix.numbers, out=product[rows])
            else:
                products_of(row_vectors, matrix.integers, product[rows])

    run_in_threads(multiply_part, [slice(begin, begin + _ROWS) for begin in range(0, len(vectors), _ROWS)])
    return [product.reshape(*x.shape[:-1], -1) for product in products]


def _new_numbers(panels: int, pairs: int) -> npt.NDArray[np.int16]:
    """Return memory for :attr:`Integers.numbers` that begins with a line of the cache."""
    numbers = np.empty(panels * pairs * PANEL * 2 + _LINE // 2, np.int16)
    first = -numbers.ctypes.data % _LINE // 2
    return numbers[first : first + panels * pairs * PANEL * 2].reshape(panels, pairs, PANEL, 2)


def _products_work(
    row_vectors: Integers, column_vectors: Integers, sums: int | None, products: int | None, stride: int, half: bool
) -> _Products:
    return _Products(
        row_vectors.numbers.ctypes.data,
        column_vectors.numbers.ctypes.data,
        row_vectors.scales.ctypes.data,
        column_vectors.scales.ctypes.data,
        len(row_vectors),
        len(column_vectors),
        row_vectors.numbers.shape[1],
        sums,
        products,
        stride,
        half,
    )


def _integers_of(vectors: Singles, numbers: npt.NDArray[np.int16], scales: Singles) -> Integers:
    """Write vectors [vectors, length] as the library does."""
    with np.errstate(invalid="ignore"):
        largest = np.abs(vectors).max(1, initial=0.0)
        is_finite, is_seen = np.isfinite(largest), largest >= _SMALLEST
        scales[...] = np.where(is_finite, np.where(is_seen, largest / _LARGEST, 0), np.nan)
        factors = np.divide(_LARGEST, largest, out=np.zeros_like(largest), where=is_finite & is_seen)
        whole_numbers = np.where(factors[:, None] == 0, 0, np.rint(vectors * factors[:, None])).astype(np.int16)
    panels, pairs = numbers.shape[:2]
    whole = np.zeros((panels * PANEL, 2 * pairs), np.int16)
    whole[: vectors.shape[0], : vectors.shape[1]] = whole_numbers
    numbers[...] = whole.reshape(panels, PANEL, pairs, 2).transpose(0, 2, 1, 3)
    squares = np.square(whole_numbers, dtype=np.int64).sum(1).astype(np.uint64)
    return Integers(numbers, scales, squares, vectors.shape[1])


def _products_of(row_vectors: Integers, column_vectors: Integers) -> Doubles:
    """Return products, float64: sums of integers are exact there."""
    scales = row_vectors.scales[:, None].astype(np.float64) * column_vectors.scales[None].astype(np.float64)
    return np.asarray(scales * (row_vectors.whole() @ column_vectors.whole().T))


def _below_diagonal(shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    rows, columns = np.ogrid[: shape[0], : shape[1]]
    return np.asarray(rows // PANEL > columns // PANEL)


def _function(name: str) -> Any | None:
    path = library_path()
    return None if path is None else library_function(str(path), name, ctypes.c_void_p)


def _call(function: Any, work: ctypes.Structure) -> None:
    if not function(ctypes.byref(work)):
        raise InputError("GRAPHOPT_OPS_ISA names instructions that this machine does not have")
