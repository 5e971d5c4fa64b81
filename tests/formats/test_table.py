from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from graphopt.errors import InputError
from graphopt.formats import FORMATS, TableFormat, format_of

# Values of a 4-bit float with 2 exponent bits: what a format with uneven steps looks like.
E2M1 = TableFormat("e2m1", 4, (0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.25, -0.5, -1, -1.5, -2, -3, -4, -6), ir.DataType.UINT8)
ALL = [*FORMATS.values(), E2M1]
NUMBERS = arrays.arrays(np.float64, st.integers(1, 40), elements=st.floats(-300, 300, width=32))


@pytest.mark.parametrize("table", ALL, ids=lambda table: table.name)
def test_every_code_means_itself(table: TableFormat) -> None:
    codes = np.arange(2**table.bits, dtype=np.uint8)
    assert np.array_equal(table.encode(table.decode(codes)), codes)


@pytest.mark.parametrize("table", ALL, ids=lambda table: table.name)
@given(numbers=NUMBERS)
def test_no_other_value_is_nearer(table: TableFormat, numbers: np.ndarray) -> None:
    chosen = np.abs(table.decode(table.encode(numbers)) - numbers)
    assert np.array_equal(chosen, np.abs(table.values[:, None] - numbers).min(0))


@pytest.mark.parametrize("table", [f for f in FORMATS.values() if not f.zero_point], ids=lambda table: table.name)
@given(share=st.floats(-1, 1))
def test_within_the_limit_an_integer_format_errs_by_half_a_step(table: TableFormat, share: float) -> None:
    number = np.array([share * table.limit])
    assert np.abs(table.decode(table.encode(number)) - number).max() <= 0.5


def test_onnx_codes_of_twos_complement() -> None:
    codes = format_of("int4").encode(np.array([-9.0, -8, -0.4, 0, 6.6, 99]))
    assert format_of("int4").to_onnx(codes).astype(int).tolist() == [-8, -8, 0, 0, 7, 7]
    assert format_of("int4").to_onnx(codes).dtype == ir.DataType.INT4.numpy()


def test_refusals() -> None:
    with pytest.raises(InputError, match="no number format 'int3'.*int4"):
        format_of("int3")
    with pytest.raises(ValueError, match="needs 4 different values"):
        TableFormat("twice", 2, (0.0, 1.0, 1.0, 2.0), ir.DataType.UINT8)
