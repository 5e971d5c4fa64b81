from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.numerics.rotations.galois import characters, prime_power


@pytest.mark.parametrize("q", [3, 5, 7, 9, 25, 27, 49, 81, 121, 125, 127, 243, 343])
def test_characters_are_those_of_a_field(q: int) -> None:
    # Jacobsthal's identities, Q Q^T = q I - J and Q J = 0, hold for the quadratic character of a field
    Q = characters(q).astype(np.int32)
    all_ones = np.ones((q, q), np.int32)
    assert np.array_equal(Q @ Q.T, q * np.eye(q, dtype=np.int32) - all_ones)
    assert not (Q @ all_ones).any()
    # -1 is a square just where q = 1 mod 4
    assert np.array_equal(Q.T, Q if q % 4 == 1 else -Q)


@pytest.mark.parametrize("q", [3, 7, 13, 31])
def test_squares_modulo_a_prime(q: int) -> None:
    assert {element for element in range(1, q) if characters(q)[element, 0] == 1} == {x * x % q for x in range(1, q)}


def test_squares_of_nine_elements() -> None:
    # whatever the polynomial, GF(3) lies in GF(9) as 0, 1, 2, and all of it are squares there
    assert characters(9)[1, 0] == characters(9)[2, 0] == 1


@pytest.mark.parametrize("q", [0, 1, 2, 6, 8, 15, 45])
def test_refuses_what_is_no_power_of_an_odd_prime(q: int) -> None:
    with pytest.raises(ValueError, match=f"{q} is no power"):
        characters(q)


@given(st.sampled_from([2, 3, 5, 7, 11, 97, 101]), st.integers(1, 6))
def test_prime_powers(prime: int, exponent: int) -> None:
    assert prime_power(prime**exponent) == (prime, exponent)


@given(st.integers(2, 300), st.integers(2, 300))
def test_products_of_coprime_numbers_are_no_prime_powers(a: int, b: int) -> None:
    if np.gcd(a, b) == 1:
        assert prime_power(a * b) is None
