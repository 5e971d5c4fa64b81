from __future__ import annotations

from itertools import permutations
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.numerics.rotations.hadamard import WILLIAMSON_ORDERS, factors, hadamard, halves, has_hadamard
from graphopt.numerics.rotations.williamson import williamson

# Widths of residual streams and of MLPs in released models.
WIDTHS = {
    **{2**power: (2**power,) for power in range(6, 15)},
    2880: (12, 12, 20),
    4864: (76, 64),
    5376: (12, 16, 28),
    5632: (44, 128),
    9728: (76, 128),
    11008: (172, 64),
    13824: (12, 12, 12, 8),
    14336: (28, 512),
    17408: (68, 256),
    18944: (148, 128),
    25600: (20, 64, 20),
    28672: (28, 1024),
}


def is_hadamard(matrix: np.ndarray) -> bool:
    """Exactly, in integers: BLAS has no part in an integer product."""
    wide = matrix.astype(np.int32)
    return set(np.unique(wide)) <= {-1, 1} and np.array_equal(wide @ wide.T, len(wide) * np.eye(len(wide), dtype=int))


@pytest.mark.parametrize("n", [1, 2, *(n for n in range(4, 257, 4) if has_hadamard(n))])
def test_every_order_in_reach_up_to_256(n: int) -> None:
    assert hadamard(n).shape == (n, n)
    assert hadamard(n).dtype == np.int8
    assert is_hadamard(hadamard(n))


@pytest.mark.parametrize("n", [344, 400, 488, 500, 1024])
def test_larger_orders(n: int) -> None:
    # 344 = 7^3 + 1 is Paley's over GF(343), and 400 = 20 x 20 a product
    assert is_hadamard(hadamard(n))


def test_orders_out_of_reach_up_to_256() -> None:
    # Such matrices are known, by constructions that are not here.
    assert [n for n in range(4, 257, 4) if not has_hadamard(n)] == [156, 188, 236]


def test_the_search_solves_the_orders_it_is_said_to() -> None:
    for order in WILLIAMSON_ORDERS:
        assert is_hadamard(williamson(order // 4))
        assert np.array_equal(williamson.__wrapped__(order // 4), hadamard(order))


@pytest.mark.parametrize("n", range(3, 24, 2))
def test_williamson_agrees_with_the_orders_that_paley_reaches_too(n: int) -> None:
    assert is_hadamard(williamson(n))


def test_a_search_that_finds_nothing_says_so() -> None:
    with pytest.raises(ValueError, match="order 35"):
        williamson(35)


@given(st.integers(3, 10_000).filter(lambda n: n % 4 != 0))
def test_no_order_that_cannot_exist(n: int) -> None:
    assert not has_hadamard(n)


@pytest.mark.parametrize("n", [-4, 0, 3, 6, 156])
def test_refuses_what_it_cannot_construct(n: int) -> None:
    with pytest.raises(ValueError, match=f"order {n}"):
        hadamard(n)


def test_matrices_are_shared_and_so_cannot_be_written() -> None:
    for n in (8, 12, 52, 92, 144):
        assert hadamard(n) is hadamard(n)
        with pytest.raises(ValueError, match="read-only"):
            hadamard(n)[0, 0] = 5


@pytest.mark.parametrize("width", WIDTHS)
def test_widths_of_real_models_are_one_block(width: int) -> None:
    assert factors(width) == WIDTHS[width]
    assert prod(factors(width)) == width


@pytest.mark.parametrize("order", sorted({order for orders in WIDTHS.values() for order in orders if order <= 1024}))
def test_factors_of_real_models_are_hadamard(order: int) -> None:
    assert is_hadamard(hadamard(order))


@given(st.integers(1, 3000))
def test_factors_are_the_largest_order_and_cost_least(width: int) -> None:
    orders = factors(width)
    assert all(order > 1 and has_hadamard(order) for order in orders)
    assert width % prod(orders) == 0
    assert prod(orders) == max(order for order in range(1, width + 1) if width % order == 0 and has_hadamard(order))
    # no factor is better replaced by two
    for order in orders:
        for low in range(2, order):
            if order % low == 0 and has_hadamard(low) and has_hadamard(order // low):
                assert cost(order) <= cost(low) + cost(order // low)
    # two powers of two would be one, of the same cost
    assert sum(map(power, orders)) <= 1
    # no other order of the factors makes smaller halves
    least_cost = min(sum(map(prod, halves(sequence))) for sequence in permutations(orders))
    assert sum(map(prod, halves(orders))) == least_cost


@given(st.integers(1, 3000))
def test_halves_are_all_of_the_factors_and_nothing_else(width: int) -> None:
    left, right = halves(factors(width))
    assert prod(left) * prod(right) == prod(factors(width))
    assert all(has_hadamard(order) for order in (*left, *right))


def power(order: int) -> bool:
    return order & (order - 1) == 0


def cost(order: int) -> int:
    return 2 * (order.bit_length() - 1) if power(order) else order


@pytest.mark.parametrize(("width", "expected"), [(1, ()), (15, ()), (10, (2,)), (6, (2,)), (40, (20, 2)), (188, (4,))])
def test_factors_of_small_and_odd_widths(width: int, expected: tuple[int, ...]) -> None:
    assert factors(width) == expected


@pytest.mark.parametrize("width", [0, -4])
def test_no_factors_of_what_is_no_width(width: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        factors(width)
