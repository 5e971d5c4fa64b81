from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.numerics.formats import FORMATS
from graphopt.numerics.formats.trellis import TILE, WORST_COST, TrellisFormat, trellis

TRELLIS_FORMATS = [format for format in FORMATS.values() if isinstance(format, TrellisFormat)]
TRELLISES = pytest.mark.parametrize("format", TRELLIS_FORMATS, ids=lambda format: format.name)


def draw(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns))


def errors(format: TrellisFormat, numbers: np.ndarray, **options: np.ndarray) -> np.ndarray:
    return (format.decode(format.encode(numbers, **options)) - numbers) ** 2


def test_four_bits_are_the_own_code_and_the_right_neighbours() -> None:
    format, codes = FORMATS["t4"], np.random.default_rng(0).integers(0, 16, (3, 21)).astype(np.uint8)
    assert isinstance(format, TrellisFormat)
    right = [*range(1, 16), 0, *range(17, 21), 16]
    expected = np.array(format.head)[codes] + np.array(format.tail)[codes[:, right]]
    np.testing.assert_array_equal(format.decode(codes), expected)


def test_two_bits_are_two_codes_and_the_next_two() -> None:
    format, codes = FORMATS["t2"], np.array([[3, 0, 2, 1]], np.uint8)
    assert isinstance(format, TrellisFormat)
    pairs = [12, 2, 9, 7]
    expected = [format.head[pairs[i]] + format.tail[pairs[(i + 2) % 4]] for i in range(4)]
    assert format.decode(codes)[0].tolist() == expected


@TRELLISES
@given(seed=st.integers(0, 1000), columns=st.integers(1, 40))
@settings(max_examples=2)
def test_what_codes_stand_for_is_encoded_as_itself(format: TrellisFormat, seed: int, columns: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**format.bits, (8, columns)).astype(np.uint8)
    numbers = format.decode(codes)
    squared_errors = errors(format, numbers)
    short = columns // TILE * TILE
    # A last tile is searched exactly, in float32 of numbers of 4 at most: squares to 1e-6. Where many windows mean the
    # same, a path with free ends can lead to a state of no exact path, so a whole tile may err; on average by little.
    assert squared_errors[:, short:].sum(1).max(initial=0) < 1e-5
    assert squared_errors[:, :short].sum() <= 0.5 * format.expected_error * squared_errors[:, :short].size


@TRELLISES
def test_a_short_tile_is_encoded_at_its_least_error(format: TrellisFormat) -> None:
    columns = 8 // format.bits
    all_codes = np.array(list(itertools.product(range(2**format.bits), repeat=columns)), np.uint8)
    values, numbers = format.decode(all_codes), draw(100, columns, 1)
    least_errors = ((values[None] - numbers[:, None]) ** 2).sum(-1).min(1)
    squared_errors = errors(format, numbers).sum(1)
    # Costs are integers, so paths that are all but equally far may be taken for one another; none of these are.
    assert squared_errors == pytest.approx(least_errors, abs=1e-5)


@TRELLISES
def test_tiles_do_not_touch_one_another(format: TrellisFormat) -> None:
    numbers = draw(4, 3 * TILE, 2)
    new_numbers = numbers.copy()
    new_numbers[:, TILE : 2 * TILE] *= -0.3
    codes, new_codes = format.encode(numbers), format.encode(new_numbers)
    for tile in (slice(0, TILE), slice(2 * TILE, None)):
        np.testing.assert_array_equal(codes[:, tile], new_codes[:, tile])
        np.testing.assert_array_equal(format.decode(codes)[:, tile], format.decode(codes[:, tile]))


@pytest.mark.parametrize(
    ("name", "scalar", "bound"), [("t2", 0.1175, 0.85), ("t3", 0.0345, 0.9), ("t4", 0.0095, 0.9), ("t5", 0.0025, 0.9)]
)
def test_normal_numbers_err_less_than_with_the_best_table_of_as_many_bits(
    name: str, scalar: float, bound: float
) -> None:
    # Max 1960, table I, has the least error of a table. The search over paths of windows of 8 bits gains a quarter to a
    # third on long rows; circles of 16 columns and tables for groups rather than for one scale take a part of it back.
    assert FORMATS[name].expected_error < bound * scalar


@TRELLISES
def test_importance_moves_the_error_to_where_it_counts_less(format: TrellisFormat) -> None:
    numbers, importance = draw(64, TILE, 3), np.ones(TILE)
    importance[::2] = 20
    plain, with_importance = errors(format, numbers), errors(format, numbers, importance=importance)
    assert (importance * with_importance).sum() < 0.9 * (importance * plain).sum()


@TRELLISES
@pytest.mark.parametrize("exponent", [-120, -20, 100])
def test_scales_of_any_size_give_the_same_codes(format: TrellisFormat, exponent: int) -> None:
    numbers, scales = draw(8, 20, 4), np.linspace(0.5, 1, 20)
    codes = format.encode(numbers * 2.0**exponent, scales * 2.0**exponent)
    np.testing.assert_array_equal(codes, format.encode(numbers, scales))


@TRELLISES
def test_costs_of_paths_are_exact_in_float32_beside_the_number_of_a_code(format: TrellisFormat) -> None:
    random = np.random.default_rng(5)
    ends = np.array([-format.farthest, format.farthest], np.float32)
    units = np.concatenate([ends, random.uniform(-1, 1, 50).astype(np.float32) * format.farthest])
    for count in (format.costs_per_step, 1 / 16):
        slopes, offsets, squares = format._terms(units, np.full(units.shape, count, np.float32))
        head, tail = np.divmod(np.arange(4**format.field), 2**format.field)
        paths = offsets[:, head] + slopes[:, head] * format.tables_in_steps[1][tail] + squares[:, tail]
        for terms in (offsets, slopes, squares, paths):
            np.testing.assert_array_equal(terms, np.rint(terms))
        worst = WORST_COST * format.costs_per_step
        assert (np.abs(paths).max() + worst + 1) * 2**format.bits <= 2**24
        assert np.abs(slopes).max() * np.abs(format.tables_in_steps[1]).max() * 2**format.bits <= 2**24


@TRELLISES
def test_values_are_bytes_for_kernels(format: TrellisFormat) -> None:
    steps = format.values * 16
    assert (steps == np.rint(steps)).all()
    assert np.abs(steps).max() <= 127


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("t3 of 3 bits has tables of 4 and 8 values")):
        trellis(3, (1,) * 4, (1,) * 8)
    with pytest.raises(ValueError, match="t4 of 4 bits has tables of 4 and 4 values"):
        trellis(4, (1,) * 4, (1,) * 4)  # a window is a code: a table
    with pytest.raises(ValueError, match="t4 of 4 bits has tables of 8 and 8 values"):
        trellis(4, (1,) * 8, (1,) * 8)  # half of a window is less than a code
    with pytest.raises(IndexError, match="t2 has no code 4"):
        FORMATS["t2"].decode(np.array([4], np.uint8))
