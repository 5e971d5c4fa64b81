"""Trellises in CUDA's products, run by the host interpreter and by a GPU where there is one.

The same weight as codes of 8 bits is what they are compared with: its kernels differ in how they decode alone.
"""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphopt.numerics.formats import FORMATS
from graphopt.runtime_ops.matmul_table.spec.activations import ON_GPUS
from graphopt.runtime_ops.matmul_table.spec.packing import pack, unpack
from tests.pairwise import pairwise
from tests.runtime_ops.cuda.products import DECODERS, Products
from tests.runtime_ops.cuda.test_matmul_table import TYPES, check, kinds_of_gpu
from tests.runtime_ops.matmul_table.test_vectors import load, trellis_of
from tests.runtime_ops.products import Case, as_bytes, trellis_case

BITS = range(2, 7)
OF_INTEGERS = ("int8", "int16")


@pytest.fixture(scope="module")
def products(kernels: ctypes.CDLL) -> Products:
    return Products(kernels)


def as_signed_bytes(case: Case) -> Case:
    """The case with the same weight as int8, for which there are the same kernels."""
    wide = as_bytes(case)
    codes = unpack(wide["codes"], case["rows"], case["columns"])
    return {**wide, "codes": pack(codes ^ 128, 8), "table": np.roll(wide["table"], 128)}


def check_trellis(products: Products, case: Case, seeds: tuple[int, ...] = (0, 1)) -> None:
    """The same bits in any order of threads, those of codes of 8 bits, and within the bound of that weight."""
    wide = as_signed_bytes(case)
    for sm90a in kinds_of_gpu(products, case):
        expected = products.table(wide, sm90a=sm90a)
        for seed in seeds:
            y = products.table(case, seed, sm90a=sm90a)
            assert y.dtype == expected.dtype
            assert y.tobytes() == expected.tobytes()
    check(products, wide, seeds=(0,))


# the type of x and the mode say together what is multiplied, so they are one choice here
@pytest.mark.parametrize(
    ("bits", "operands", "count", "columns"),
    pairwise(BITS, [(mode, dtype) for mode in ON_GPUS for dtype in TYPES], [1, 8, 13, 19], [64, 48, 47, 30, 29, 1]),
)
def test_a_trellis_is_its_bytes(
    products: Products, bits: int, operands: tuple[str, type], count: int, columns: int
) -> None:
    """In all operands; groups end within blocks of K; tiles of fewer columns are smaller circles."""
    activations, dtype = operands
    case = trellis_case(200, columns, 48, bits, leading=(count,), bias=True, zero_points=(bits + count) % 2 == 0)
    check_trellis(products, {**case, "x": case["x"].astype(dtype), "activations": activations})


@pytest.mark.parametrize(
    ("dtype", "activations"), [(np.float16, "float32"), (np.float32, "int8"), (np.float16, "int16")]
)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 9, 70])
def test_kernels_of_whole_blocks(products: Products, bits: int, count: int, dtype: type, activations: str) -> None:
    """Groups of whole blocks of K, as few and many rows stream them; K is cut into parts that are summed up."""
    case = trellis_case(1100, 48, 128, bits, leading=(count,))
    check_trellis(products, {**case, "x": case["x"].astype(dtype), "activations": activations}, seeds=(2,))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("columns", [40, 45])
@pytest.mark.parametrize("count", [70, 130])
def test_tiles_of_many_rows(products: Products, bits: int, columns: int, count: int) -> None:
    """K in one part, so y is written through shared memory, where columns side by side lie apart."""
    case = trellis_case(300, columns, 128, bits, leading=(count,), bias=True)
    check_trellis(products, {**case, "x": case["x"].astype(np.float16), "activations": "float32"}, seeds=(3,))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 16])
def test_a_scale_for_each_column(products: Products, bits: int, count: int) -> None:
    """As the presets `tiny` and `mini` store them; K fills no block up."""
    case = trellis_case(4300, 80, 4300, bits, leading=(count,), scale_type=np.float16)
    check_trellis(products, {**case, "x": case["x"].astype(np.float16), "activations": "float32"})


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(st.integers(1, 300), st.integers(1, 50)),
    group=st.sampled_from([16, 32, 48, 128, 0]),
    bits=st.sampled_from(BITS),
    count=st.integers(0, 35),
    zero_points=st.booleans(),
    operands=st.tuples(st.sampled_from(ON_GPUS), st.sampled_from(TYPES)),
    seed=st.integers(0, 2**31),
)
def test_any_trellis(
    products: Products,
    shape: tuple[int, int],
    group: int,
    bits: int,
    count: int,
    zero_points: bool,
    operands: tuple[str, type],
    seed: int,
) -> None:
    activations, dtype = operands
    case = trellis_case(*shape, group or shape[0], bits, leading=(count,), zero_points=zero_points, seed=seed)
    case |= {"x": case["x"].astype(dtype), "activations": activations}
    check_trellis(products, case, seeds=(seed, seed + 1))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("frozen", load("matmul_table", "trellis1.json"), ids=lambda frozen: str(frozen["rows"]))
def test_frozen_trellises(products: Products, frozen: dict, dtype: type) -> None:
    """Their weights have few bits, so the identity times one is it, in every type."""
    case = {**trellis_of(frozen), "activations": "float32"}
    case["x"] = case["x"].astype(dtype)
    if case["group"] % 16 and case["group"] != case["rows"]:
        pytest.skip("MatMulTable has no such groups")
    assert np.array_equal(products.table(case), np.array(frozen["W"]).astype(dtype))


def tables(head: list[int], tail: list[int]) -> np.ndarray:
    """Tables of 16 entries in steps of 1/4, whose other entries are the first ones."""
    return np.array([values + values[:1] * (16 - len(values)) for values in (head, tail)], np.float32) / 4


@pytest.mark.parametrize(
    ("head", "tail", "has_decoder"),
    [
        ([-127, 127], [0], True),
        ([0], [-127, 0], True),
        ([-63], [-64, 63], True),
        ([0], [-127, 127], False),
        ([30000, 30100], [-30127, -30001], True),
        ([-30000, -29950], [29873, 30077], False),
    ],
)
@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_tables_that_reach_far(
    products: Products, head: list[int], tail: list[int], has_decoder: bool, activations: str
) -> None:
    """The ends of a byte, and tables of which one takes off what the other has; a wide tail has no decoder."""
    case = trellis_case(64, 32, 32, 4, leading=(3,))
    case |= {"x": case["x"].astype(np.float16), "table": tables(head, tail), "activations": activations}
    operands = {"float32": "float16", "int8": "int8"}[activations]
    assert DECODERS[products.pack(case, operands)[0].decoder] == ("trellis4" if has_decoder else "int8")
    # the same sums, from tables near zero
    middle = np.float32(round(float(case["table"][1].min()) * 4) / 4)
    near = case["table"] + np.float32([[middle], [-middle]])
    in_steps_of_32nds = {**case, "table": near / 8}
    expected = products.table(as_signed_bytes(in_steps_of_32nds)).astype(np.float64) * 8
    # float16 rounds y once, by a share of 2^-11; 8 is a power of two
    assert np.allclose(products.table(case), expected, rtol=2.0**-10, atol=2.0**-20)


@pytest.mark.parametrize(
    ("name", "columns", "float16", "int8", "bytes_of_weight"),
    [
        ("t2", 32, "trellis2", "trellis2", 2 / 8),
        ("t3", 32, "trellis3", "trellis3", 3 / 8),
        ("t4", 32, "trellis4", "trellis4", 4 / 8),
        ("t5", 32, "int8", "int8", 1),
        ("t2", 29, "trellis2", "trellis2", 2 / 8),
        ("t2", 30, "int8", "int8", 1),
        ("t3", 30, "trellis3", "trellis3", 3 / 8),
        ("t3", 31, "int8", "int8", 1),
        ("t4", 31, "trellis4", "trellis4", 4 / 8),
    ],
)
def test_each_trellis_has_its_decoder(
    products: Products, name: str, columns: int, float16: str, int8: str, bytes_of_weight: float
) -> None:
    """Of the shipped formats; those without one, and other operands, are packed as bytes."""
    table_bytes = 1024
    case = {**trellis_case(128, columns, 128, FORMATS[name].bits), "table": FORMATS[name].operands["tables"]}
    for operands, decoder in (("float16", float16), ("int8", int8), ("bfloat16", "table"), ("float32", "table")):
        codec, packed_codes = products.pack(case, operands)
        assert DECODERS[codec.decoder] == decoder
        size = 1 if decoder == "table" else bytes_of_weight
        assert len(packed_codes) == 128 * 32 * size + table_bytes


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("count", [1, 20])
def test_what_is_not_finite_stays_in_its_row(products: Products, bad: float, count: int, dtype: type) -> None:
    case = {**trellis_case(128, 32, 128, 3, leading=(count,)), "activations": "float32"}
    case["x"] = case["x"].astype(dtype)
    case["x"][count // 2, 40] = bad
    y = products.table(case).astype(np.float32)
    assert not np.isfinite(y[count // 2]).any()
    assert np.isfinite(np.delete(y, count // 2, axis=0)).all()
