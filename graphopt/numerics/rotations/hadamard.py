"""Hadamard matrices: H with entries +1 and -1, and H H^T = n I.

Constructions (Horadam 2007, "Hadamard Matrices and Their Applications", chapter 2):

* n = 2^k: Sylvester, H_2n = [[1, 1], [1, -1]] (x) H_n from H_1 = [1].
* Paley I, n = q + 1 for a prime power q = 3 mod 4: H = I + S, S = [[0, 1], [-1, Q]], Q[i, j] = chi(a_i - a_j) for the
  quadratic character chi of GF(q).
* Paley II, n = 2 (q + 1) for a prime power q = 1 mod 4: C = [[0, 1], [1, Q]] with 0 -> [[1, -1], [-1, -1]],
  +-1 -> +-[[1, 1], [1, -1]].
* Williamson, n = 92, 116 and 172, which Paley does not reach: :mod:`graphopt.numerics.rotations.williamson`.
* Kronecker products of all of these.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from itertools import permutations
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphopt.numerics.rotations.galois import characters, prime_power
from graphopt.numerics.rotations.williamson import williamson

if TYPE_CHECKING:
    from collections.abc import Callable

Signs = npt.NDArray[np.int8]

WILLIAMSON_ORDERS = frozenset({92, 116, 172})
"""Orders that Paley and Kronecker products do not reach, and that the search for Williamson's matrices does."""

_H2 = np.array([[1, 1], [1, -1]], np.int8)


@lru_cache(maxsize=16)
def hadamard(n: int) -> Signs:
    """Return a Hadamard matrix of order ``n``, int8 [n, n], read-only; every call returns the same matrix.

    Raises:
        ValueError: no implemented construction reaches ``n``.
    """
    direct = _construction(n)
    if direct is not None:
        matrix = direct()
    elif has_hadamard(n):
        matrix = reduce(np.kron, (hadamard(order) for order in factors(n)))
    else:
        raise ValueError(f"no construction of a Hadamard matrix of order {n} is implemented")
    matrix.flags.writeable = False
    return matrix


def has_hadamard(n: int) -> bool:
    """Return whether :func:`hadamard` can construct order ``n``, without constructing it."""
    return n > 0 and _cheapest(n) is not None


@lru_cache(maxsize=256)
def factors(width: int) -> tuple[int, ...]:
    """Return Hadamard orders whose product is the largest order in reach that divides ``width``.

    Among factorisations it is the one whose fast transform takes the fewest additions per coordinate: d for a factor d,
    2 k for a factor 2^k. They stand in the order in which the matrices of :func:`halves` are smallest; among equals
    they ascend, but for the one power of two, which is last. An odd ``width`` has none.

    Raises:
        ValueError: ``width`` is not positive.
    """
    if width < 1:
        raise ValueError(f"a width is positive, not {width}")
    order = next(order for order in _divisors(width) if has_hadamard(order))
    cheapest = _cheapest(order)
    assert cheapest is not None
    # min takes the first among equals, and permutations begin with what they are given.
    return min(permutations(cheapest[1]), key=lambda factors: sum(map(prod, halves(factors))))


def halves(factors: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cut ``factors`` in two, a power of two perhaps within it, so that the sum of the two products is least."""
    cuts = []
    for index, order in enumerate(factors):
        parts = [1 << power for power in range(order.bit_length())] if _is_power_of_two(order) else [1, order]
        cuts += [((*factors[:index], part), (order // part, *factors[index + 1 :])) for part in parts]
    return min(cuts, key=lambda cut: prod(cut[0]) + prod(cut[1]), default=((), ()))


@lru_cache(maxsize=4096)
def _cheapest(n: int) -> tuple[int, tuple[int, ...]] | None:
    """Return the least cost of a product of constructible orders that is ``n``, and its factors, or None."""
    if _is_power_of_two(n):
        return (2 * (n.bit_length() - 1), (n,) if n > 1 else ())
    candidates = []
    for divisor in _divisors(n):
        cofactor = None if _is_power_of_two(divisor) or not _construction(divisor) else _cheapest(n // divisor)
        if cofactor is not None:
            factors = sorted((divisor, *cofactor[1]), key=lambda order: (_is_power_of_two(order), order))
            candidates.append((divisor + cofactor[0], tuple(factors)))
    return min(candidates, default=None)


def _construction(n: int) -> Callable[[], Signs] | None:
    """Return the construction that makes order ``n`` without a product of others, if there is one."""
    if n > 0 and _is_power_of_two(n):
        return lambda: _sylvester(n)
    if n < 1 or n % 4:
        return None
    if n in WILLIAMSON_ORDERS:
        return lambda: williamson(n // 4)
    if prime_power(n - 1):  # 3 mod 4, as n is 0 mod 4
        return lambda: _paley_one(n - 1)
    half = n // 2 - 1
    return (lambda: _paley_two(half)) if half % 4 == 1 and prime_power(half) else None


def _sylvester(n: int) -> Signs:
    return np.ones((1, 1), np.int8) if n == 1 else np.kron(_H2, _sylvester(n // 2))


def _paley_one(q: int) -> Signs:
    matrix = np.eye(q + 1, dtype=np.int8)
    matrix[0, 1:], matrix[1:, 0] = 1, -1
    matrix[1:, 1:] += characters(q)
    return matrix


def _paley_two(q: int) -> Signs:
    conference = np.zeros((q + 1, q + 1), np.int8)
    conference[0, 1:] = conference[1:, 0] = 1
    conference[1:, 1:] = characters(q)
    zero = np.array([[1, -1], [-1, -1]], np.int8)
    # A block of 2 x 2 for each entry, as np.kron has it, which takes ten times as long.
    matrix = np.empty((2 * (q + 1), 2 * (q + 1)), np.int8)
    for row, column in np.ndindex(2, 2):
        part = matrix[row::2, column::2]
        np.multiply(conference, _H2[row, column], out=part)
        np.fill_diagonal(part, zero[row, column])
    return matrix


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def _divisors(n: int) -> list[int]:
    """Return all divisors of ``n``, largest first."""
    small = [divisor for divisor in range(1, int(n**0.5) + 1) if n % divisor == 0]
    return sorted({*small, *(n // divisor for divisor in small)}, reverse=True)
