from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from graphopt.errors import InputError
from graphopt.numerics.formats import FORMATS, TableFormat, format_of

# Neither in order nor with a zero, and two codes of one value.
CUSTOM = format_of([3.0, -0.5, 1.25, -4.0, 3.0])
TABLE_FORMATS = [*(format for format in FORMATS.values() if isinstance(format, TableFormat)), CUSTOM]
TABLES = pytest.mark.parametrize("table", TABLE_FORMATS, ids=lambda table: table.name)
NUMBERS = arrays.arrays(np.float64, st.integers(1, 40), elements=st.floats(-300, 300, width=32))


@TABLES
def test_every_value_is_encoded_as_the_lowest_of_its_codes(table: TableFormat) -> None:
    codes = np.arange(len(table.table), dtype=np.uint8)
    new_codes = table.encode(table.decode(codes))
    assert np.array_equal(table.decode(new_codes), table.decode(codes))
    assert new_codes.tolist() == [table.table.index(value) for value in table.table]


@TABLES
@given(numbers=NUMBERS)
@settings(max_examples=30)
def test_no_other_value_is_nearer(table: TableFormat, numbers: np.ndarray) -> None:
    errors = np.abs(table.decode(table.encode(numbers)) - numbers)
    assert np.array_equal(errors, np.abs(table.values[:, None] - numbers).min(0))


@TABLES
def test_halfway_goes_to_the_even_code(table: TableFormat) -> None:
    values = np.unique(table.values)
    halfway = (values[1:] + values[:-1]) / 2
    lower_codes, upper_codes = table.encode(values[:-1]), table.encode(values[1:])
    expected = np.where((lower_codes % 2 == 1) & (upper_codes % 2 == 0), upper_codes, lower_codes)
    assert np.array_equal(table.encode(halfway), expected)
    # In all formats that are not custom one of the two neighbours is even: the rule leaves nothing open.
    assert table is CUSTOM or (lower_codes % 2 != upper_codes % 2).all()


@TABLES
def test_beyond_the_ends_it_is_the_end(table: TableFormat) -> None:
    assert table.decode(table.encode(np.array([-1e9, 1e9]))).tolist() == [min(table.table), max(table.table)]


@TABLES
@given(share=st.floats(-1, 1))
@settings(max_examples=30)
def test_within_the_limit_the_error_is_half_a_gap(table: TableFormat, share: float) -> None:
    number = np.array([share * table.limit])
    if not table.zero_point:  # those reach from 0 up
        half = np.diff(np.unique(table.values)).max() / 2
        assert np.abs(table.decode(table.encode(number)) - number).max() <= half


def test_limits() -> None:
    # integers: half a step beyond the lesser end; others: the end, so that a group's largest weight is exact
    expected = {"int4": 7.5, "int8": 127.5, "ternary": 1.5, "fp4": 6.0, "fp6-e2m3": 7.5, "fp6-e3m2": 28.0}
    expected |= {"fp8-e4m3": 448.0, "fp8-e5m2": 57344.0, "nf4": 1.0, "sf4": 1.0}
    assert {name: FORMATS[name].limit for name in expected} == expected
    assert format_of([-1.5, -0.5, 0.5, 1.5]).limit == 2
    assert format_of([0.0, 1.0, 2.0]).limit == 2.5
    assert format_of([-8.0, 0.0, 1.0]).limit == 1


def test_onnx_codes_of_twos_complement() -> None:
    codes = format_of("int4").encode(np.array([-9.0, -8, -0.4, 0, 6.6, 99]))
    assert format_of("int4").to_onnx(codes).astype(int).tolist() == [-8, -8, 0, 0, 7, 7]
    assert format_of("int4").to_onnx(codes).dtype == ir.DataType.INT4.numpy()


@pytest.mark.parametrize("table", [f for f in FORMATS.values() if f.onnx_type], ids=lambda table: table.name)
def test_onnx_types_hold_the_values(table: TableFormat) -> None:
    codes = table.encode(table.values)
    assert np.array_equal(table.to_onnx(codes).astype(np.float64), table.values)
    assert table.onnx_type is not None
    assert table.onnx_type.bitwidth == table.bits


def test_a_recipe_may_bring_its_own_table() -> None:
    table = format_of([0, 0.1, -0.1, 7])
    assert (table.name, table.bits, table.onnx_type) == ("custom", 2, None)
    assert table.table == (0.0, float(np.float32(0.1)), -float(np.float32(0.1)), 7.0)
    assert format_of(list(range(256))).bits == 8
    assert format_of([1.0, 2.0]).bits == 1
    assert format_of([1.0, 2.0, 4.0]).bits == 2
    assert CUSTOM.encode(np.array([2.9, 1.3])).tolist() == [0, 2]
    with pytest.raises(IndexError):
        CUSTOM.decode(np.array([5], np.uint8))


@pytest.mark.parametrize(
    "numbers", [[], [1.0], [2.0, 2.0], [0.0, -0.0], range(257), [0, np.nan], [1, 1e39], [1, np.inf]]
)
def test_refused_tables(numbers: list[float]) -> None:
    with pytest.raises(InputError, match="cannot be a number format"):
        format_of(numbers)


def test_refusals() -> None:
    with pytest.raises(InputError, match="no number format 'int9'.*int4"):
        format_of("int9")
    with pytest.raises(ValueError, match="five has 5 values in 2 bits"):
        TableFormat("five", 2, (0.0, 1.0, 2.0, 3.0, 4.0))
    with pytest.raises(ValueError, match="must be finite, of float32"):
        TableFormat("wide", 2, (0.0, 0.1))
    with pytest.raises(ValueError, match="zero points, so its values must be 0 .. 3"):
        TableFormat("odd", 2, (0.0, 1.0, 2.0), zero_point=True)
    with pytest.raises(ValueError, match="ONNX has no type for nf4"):
        format_of("nf4").to_onnx(np.zeros(1, np.uint8))
