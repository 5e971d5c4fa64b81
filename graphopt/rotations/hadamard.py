"""Hadamard matrices: H with entries +1 and -1, and H H^T = n I.

Constructions, in the order they are tried (Horadam 2007, "Hadamard Matrices and Their Applications", chapter 2):

* n = 2^k: Sylvester, H_2n = [[1, 1], [1, -1]] (x) H_n from H_1 = [1].
* Paley I, n = q + 1 for a prime q = 3 mod 4: H = I + S, S = [[0, 1], [-1, Q]], Q the quadratic residues.
* Paley II, n = 2 (q + 1) for a prime q = 1 mod 4: C = [[0, 1], [1, Q]] with 0 -> [[1, -1], [-1, -1]],
  +-1 -> +-[[1, 1], [1, -1]].
* n = 2 m: Sylvester's doubling of H_m.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Signs = npt.NDArray[np.int8]

_H2 = np.array([[1, 1], [1, -1]], np.int8)


@lru_cache(maxsize=32)
def hadamard(n: int) -> Signs:
    """Return a Hadamard matrix of order ``n``, int8 [n, n].

    Raises:
        ValueError: no construction known here reaches ``n``.
    """
    if n == 1:
        matrix = np.ones((1, 1), np.int8)
    elif n > 0 and n & (n - 1) == 0:
        matrix = np.kron(_H2, hadamard(n // 2))
    elif n % 4 == 0 and (n - 1) % 4 == 3 and _is_prime(n - 1):
        matrix = _paley_one(n - 1)
    elif n % 4 == 0 and (n // 2 - 1) % 4 == 1 and _is_prime(n // 2 - 1):
        matrix = _paley_two(n // 2 - 1)
    elif n % 2 == 0 and has_hadamard(n // 2):
        matrix = np.kron(_H2, hadamard(n // 2))
    else:
        raise ValueError(f"no construction of a Hadamard matrix of order {n} is known here")
    matrix.flags.writeable = False
    return matrix


@lru_cache(maxsize=256)
def has_hadamard(n: int) -> bool:
    """Return whether :func:`hadamard` can construct order ``n``."""
    if n in (1, 2):
        return True
    if n < 1 or n % 4:
        return False
    paley_two = (n // 2 - 1) % 4 == 1 and _is_prime(n // 2 - 1)
    return _is_prime(n - 1) or paley_two or has_hadamard(n // 2)


def _residues(q: int) -> Signs:
    """Return Q[i, j] = chi(i - j), the quadratic character modulo the prime ``q``."""
    chi = -np.ones(q, np.int8)
    chi[(np.arange(1, q) ** 2) % q] = 1
    chi[0] = 0
    index = np.arange(q)
    characters: Signs = chi[(index[:, None] - index[None, :]) % q]
    return characters


def _paley_one(q: int) -> Signs:
    matrix = np.zeros((q + 1, q + 1), np.int8)
    matrix[0, 1:], matrix[1:, 0], matrix[1:, 1:] = 1, -1, _residues(q)
    return matrix + np.eye(q + 1, dtype=np.int8)


def _paley_two(q: int) -> Signs:
    conference = np.zeros((q + 1, q + 1), np.int8)
    conference[0, 1:] = conference[1:, 0] = 1
    conference[1:, 1:] = _residues(q)
    zero = np.array([[1, -1], [-1, -1]], np.int8)
    return np.kron(conference, _H2) + np.kron(np.eye(q + 1, dtype=np.int8), zero)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % divisor for divisor in range(2, int(n**0.5) + 1))
