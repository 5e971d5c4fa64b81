"""Multiplying by a Kronecker product of Hadamard matrices without building it."""

from __future__ import annotations

from functools import lru_cache, reduce
from math import prod

import numpy as np
import numpy.typing as npt

from graphopt.numerics.rotations.hadamard import Signs, hadamard, halves

Doubles = npt.NDArray[np.float64]

_RADIX = 16  # a power of two is applied in steps of this order: dense, and still the fastest in NumPy


def transform(rows: Doubles, factors: tuple[int, ...]) -> Doubles:
    """Return ``rows`` [n, width] times I (x) H_f1 (x) H_f2 ..., one small factor after the other.

    The axis before a matrix product is the stack that NumPy goes through one by one, so that the shape of each product
    (and with it BLAS's order of summation) depends on the factors alone.
    """
    shape, stride = rows.shape, prod(factors)
    for factor in (step for order in factors for step in _steps(order)):
        stride //= factor
        matrix = hadamard(factor).astype(np.float64)
        if stride > 1:
            rows = matrix.T @ rows.reshape(-1, factor, stride)
        else:
            rows = rows.reshape(shape[0], -1, factor) @ matrix
    return rows.reshape(shape)


def _steps(order: int) -> tuple[int, ...]:
    """Cut a large power of two into orders whose product it is: Sylvester's H_2^(i + j) is H_2^i (x) H_2^j."""
    if order <= _RADIX or order & (order - 1):
        return (order,)
    return (_RADIX, *_steps(order // _RADIX))


@lru_cache(maxsize=16)
def pair(factors: tuple[int, ...]) -> tuple[Signs, Signs]:
    """Return int8 [a, a] and [b, b], read-only, whose Kronecker product is that of all ``factors``; a + b is least."""
    first, second = halves(factors)
    return _product(first), _product(second)


def _product(factors: tuple[int, ...]) -> Signs:
    matrix = reduce(np.kron, (hadamard(order) for order in factors or (1,)))
    matrix.flags.writeable = False
    return matrix
