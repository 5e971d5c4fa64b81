"""The quadratic character of a finite field GF(q), q = p^k: which elements are squares.

Paley's Hadamard matrices need nothing else of the field, and a primitive polynomial gives it: modulo one, the powers of
x run through every element but 0, so the squares are the even powers.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np
import numpy.typing as npt


@lru_cache(maxsize=1024)
def prime_power(q: int) -> tuple[int, int] | None:
    """Return (p, k) where ``q`` is p^k for a prime p and k >= 1, else None."""
    if q < 2:
        return None
    prime = next((divisor for divisor in range(2, int(q**0.5) + 1) if q % divisor == 0), q)
    exponent, quotient = 0, q
    while quotient % prime == 0:
        exponent, quotient = exponent + 1, quotient // prime
    return (prime, exponent) if quotient == 1 else None


def characters(q: int) -> npt.NDArray[np.int8]:
    """Return chi(a_i - a_j) for the elements a_0, ... of GF(q), int8 [q, q]: 1 for squares, -1 for others, 0 for 0.

    Element a_i is the polynomial whose coefficients are the digits of i in base p, constant first.

    Raises:
        ValueError: ``q`` is no power of an odd prime.
    """
    parts = prime_power(q)
    if parts is None or parts[0] == 2:
        raise ValueError(f"{q} is no power of an odd prime")
    prime, degree = parts
    weights = prime ** np.arange(degree)
    chi = np.zeros(q, np.int8)
    powers = np.array(_powers_of_x(prime, degree)) @ weights
    chi[powers[0::2]], chi[powers[1::2]] = 1, -1
    if degree == 1:  # a row is the one before it, moved on by one: chi(i - j) is found at q - i + j of this
        return np.lib.stride_tricks.sliding_window_view(np.tile(np.roll(chi[::-1], 1), 2), q)[q:0:-1]
    digits = np.arange(q)[:, None] // weights % prime
    # row by row: a table of all differences at once would take 8 k bytes an entry
    return np.stack([chi[(element - digits) % prime @ weights] for element in digits])


def _powers_of_x(prime: int, degree: int) -> list[tuple[int, ...]]:
    """Return 1, x, x^2, ... modulo the first primitive polynomial x^k - r(x), as coefficients, constant first.

    A polynomial modulo which these are p^k - 1 elements is primitive: every element but 0 is then a power of x, and so
    has an inverse.
    """
    unit = (1, *[0] * (degree - 1))
    for remainder in product(range(prime), repeat=degree):
        if remainder[0] == 0:
            continue
        powers, power = [unit], _times_x(unit, remainder, prime)
        while power != unit:
            powers.append(power)
            power = _times_x(power, remainder, prime)
        if len(powers) == prime**degree - 1:
            return powers
    raise AssertionError(f"every finite field has a primitive polynomial, GF({prime}^{degree}) too")


def _times_x(element: tuple[int, ...], remainder: tuple[int, ...], prime: int) -> tuple[int, ...]:
    """Multiply by x, where x^k = ``remainder``. Its constant is not 0, so this permutes the ring's elements."""
    top = element[-1]
    coefficients = (0, *element[:-1])
    return tuple((low + top * part) % prime for low, part in zip(coefficients, remainder, strict=True))
