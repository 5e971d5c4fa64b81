from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from graphopt.compile.clusters.parcels import ARRAY_BYTES, LIMIT, unwrap, wrap
from graphopt.errors import InputError
from graphopt.graph.weights import Inline, Scale

BOUND = LIMIT + 1024
"""Bytes of a pickled parcel: its message, names of fields, the folder."""


def test_large_arrays_lie_in_the_folder_under_their_digest(tmp_path: Path) -> None:
    array = np.arange(ARRAY_BYTES, dtype=np.float32)
    expression = Scale(Inline.from_array(array.reshape(8, -1)), Inline.from_array(np.arange(8.0)), 0)
    parcel = wrap((expression, array), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [hashlib.sha256(array.tobytes()).hexdigest()]
    assert len(pickle.dumps(parcel)) < 2048  # names, digests and the path of the folder, and no array
    copy, array_copy = unwrap(pickle.loads(pickle.dumps(parcel)))
    assert copy.digest == expression.digest
    assert np.array_equal(copy.numpy(), expression.numpy())
    assert np.array_equal(array_copy, array)


@given(
    st.lists(npst.arrays(np.int16, npst.array_shapes(max_dims=3, max_side=40)), max_size=8),
    st.text(max_size=LIMIT),
    st.integers(0, 5),
)
def test_any_value_comes_back_and_its_message_is_bounded(
    tmp_path_factory: pytest.TempPathFactory, arrays: list[np.ndarray], text: str, copies: int
) -> None:
    value = (arrays, text * copies, [[array] for array in arrays])
    parcel = wrap(value, tmp_path_factory.getbasetemp())
    assert len(pickle.dumps(parcel)) <= BOUND
    contents = unwrap(parcel)
    assert contents[1] == value[1]
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(contents[0], arrays, strict=True))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.dtype("U3"), np.bool_])
def test_types_of_arrays_stay(tmp_path: Path, dtype: object) -> None:
    array = np.zeros((70, 90), dtype)
    copy = unwrap(wrap(array, tmp_path))
    assert copy.dtype == array.dtype
    assert np.array_equal(copy, array)


def test_without_a_folder_only_small_values_travel(tmp_path: Path) -> None:
    assert unwrap(wrap([1, 2], None)) == [1, 2]
    with pytest.raises(InputError, match=r"a task of 8\d,\d{3} bytes cannot be sent .* name a work folder"):
        wrap(np.zeros(10_000), None)
    parcel = wrap(np.zeros(10_000), tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(InputError, match=r"not in the folder that all processes share.*removed meanwhile"):
        unwrap(parcel)
