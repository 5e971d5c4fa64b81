"""Codes as CUDA kernels read them: a permutation of their bits, which the kernels undo."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphopt.numerics.formats import FORMATS
from graphopt.numerics.formats.table import TableFormat
from graphopt.runtime_ops.matmul_table.spec.packing import pack
from tests.runtime_ops.cuda.products import OPERANDS, Products
from tests.runtime_ops.products import Case, case_of

TABLE_BYTES = 1024
ROWS, COLUMNS = 128, 16  # of a block


@pytest.fixture(scope="module")
def products(kernels: ctypes.CDLL) -> Products:
    return Products(kernels)


def bits_of(products: Products, codes: np.ndarray, table: np.ndarray, operands: str) -> np.ndarray:
    bits = (len(table) - 1).bit_length()
    case = {"codes": pack(codes, bits), "table": table, "rows": codes.shape[0], "columns": codes.shape[1]}
    return np.unpackbits(products.pack(case, operands)[1][:-TABLE_BYTES], bitorder="little")


def tables() -> dict[str, np.ndarray]:
    """One for each way that codes are decoded, and for each number of bits."""
    of_formats = {
        name: np.array(format.table, np.float32) for name, format in FORMATS.items() if isinstance(format, TableFormat)
    }
    return of_formats | {
        f"{bits} bits": np.random.default_rng(bits).random(2**bits, np.float32) for bits in range(1, 9)
    }


TABLES = tables()


@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("name", TABLES)
def test_each_bit_of_a_block_has_a_place_of_its_own(products: Products, name: str, operands: str) -> None:
    """Codes that spell the number of their place, bit by bit, tell where each bit of each code went."""
    table = TABLES[name]
    bits = (len(table) - 1).bit_length()
    number = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    nothing = bits_of(products, np.zeros((ROWS, COLUMNS), np.uint8), table, operands)
    places = []
    for bit in range(bits):
        packed = [
            bits_of(products, (spelled << bit).astype(np.uint8), table, operands) ^ nothing
            for spelled in [np.ones_like(number), *(number >> digit & 1 for digit in range(11))]
        ]
        these = np.flatnonzero(packed[0])
        assert len(these) == ROWS * COLUMNS
        told = sum(digits[these].astype(int) << digit for digit, digits in enumerate(packed[1:]))
        assert np.array_equal(np.sort(told), np.arange(ROWS * COLUMNS))
        places.append(these)
    assert np.array_equal(np.sort(np.concatenate(places)), np.arange(ROWS * COLUMNS * bits))


def identity_of(case: Case) -> Case:
    """The case with 1 as each scale and an x that asks for each row of W."""
    return case | {"scales": np.ones_like(case["scales"]), "x": np.eye(case["rows"], dtype=np.float32)}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(TABLES)),
    rows=st.integers(1, 150),
    columns=st.integers(1, 40),
    dtype=st.sampled_from([np.float32, np.float16]),
    seed=st.integers(0, 2**31),
)
def test_kernels_decode_what_was_packed(
    products: Products, name: str, rows: int, columns: int, dtype: type, seed: int
) -> None:
    """The identity times W is W: the codes' numbers, exactly, or to the nearest float16."""
    table = TABLES[name]
    codes = np.random.default_rng(seed).integers(0, len(table), (rows, columns)).astype(np.uint8)
    case = identity_of(case_of(rows, columns, rows, (len(table) - 1).bit_length()))
    case |= {"codes": pack(codes, (len(table) - 1).bit_length()), "table": table, "activations": "float32"}
    case["x"] = case["x"].astype(dtype)
    expected = table[codes]
    if dtype == np.float16:
        expected = expected.astype(np.float16)
    assert np.array_equal(products.table(case), expected)


@pytest.mark.parametrize("name", ["int4", "fp6-e2m3"])
def test_large_matrices_are_packed_by_several_threads(products: Products, name: str) -> None:
    """1024 blocks, cut into parts for threads, and each 256 of them as a matrix of its own."""
    table = np.array(FORMATS[name].table, np.float32)
    codes = np.random.default_rng(0).integers(0, len(table), (ROWS * 8, COLUMNS * 128)).astype(np.uint8)
    parts = [bits_of(products, part, table, "float16") for part in np.split(codes, 4, axis=1)]
    assert np.array_equal(bits_of(products, codes, table, "float16"), np.concatenate(parts))
