"""MatMulTable's CUDA kernels, run by the host interpreter and by a GPU where there is one."""

from __future__ import annotations

import ctypes
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphopt.numerics.formats import FORMATS
from graphopt.runtime_ops.matmul_table.spec.activations import ON_GPUS
from graphopt.runtime_ops.matmul_table.spec.op import dequantize, reference
from tests.pairwise import pairwise
from tests.runtime_ops.cuda.products import DECODERS, Products
from tests.runtime_ops.matmul_table.bound import TENSOR_CORE_UNIT, UNIT, bound, product_bound
from tests.runtime_ops.matmul_table.test_kernels import TABLES
from tests.runtime_ops.matmul_table.test_op import of_float32
from tests.runtime_ops.matmul_table.test_vectors import inputs_of, load
from tests.runtime_ops.products import Case, any_case, case_of

BFLOAT16 = ml_dtypes.bfloat16
TYPES = (np.float32, np.float16, BFLOAT16)
EACH_TYPE = pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.__name__)
EACH_MODE = pytest.mark.parametrize("activations", ON_GPUS)

# significant bits, the leading one included, and half of the least positive number
PRECISION = {np.float32: (24, 2.0**-150), np.float16: (11, 2.0**-25), BFLOAT16: (8, 2.0**-134)}


@pytest.fixture(scope="module")
def products(kernels: ctypes.CDLL) -> Products:
    return Products(kernels)


def limit_of(case: Case, *, sm90a: bool = False) -> np.ndarray:
    """The operator's bound, of tensor cores where there are floats on them, and then y rounded to the type of x.

    On sm_90a more than 16 rows of float16 may meet weights that are scaled in float16.
    """
    dtype = case["x"].dtype.type
    wide = {**case, "x": case["x"].astype(np.float32)}
    if case["activations"] in ("int8", "int16") or (case["activations"], dtype) == ("float32", np.float32):
        limit = bound(**wide)
    elif (case["activations"], dtype) == ("float32", np.float16):
        # the table as float16, scaled so that its largest number is just below 2^15: x is taken as it is
        table = np.abs(case["table"].astype(np.float64))
        scale = np.exp2(np.floor(np.log2(table.max())) - 14) if table.any() else 1.0
        off = table * 2.0**-11 + scale * 2.0**-25
        if sm90a and np.prod(case["x"].shape[:-1]) > 16:
            # a scale to float16, and a weight; the largest of all is above 2^12 there, or a decoded number is below 1
            scales = np.abs(case["scales"].astype(np.float64))
            spread = scales.max() / scales[scales > 0].min() if scales.any() else 1.0
            off = off + table * (2.0**-10 + 2.0**-21) + table.max() * spread * 2.0**-25
        of_product = {key: value for key, value in wide.items() if key not in ("x", "activations")}
        nothing = np.zeros(case["x"].shape)
        limit = product_bound(wide["x"], nothing, table_off=off, **of_product, levels=0, unit=TENSOR_CORE_UNIT)
    else:
        limit = bound(**{**wide, "activations": "bfloat16"}, unit=TENSOR_CORE_UNIT)
    bits, least = PRECISION[dtype]
    return limit + (0 if dtype == np.float32 else (np.abs(exact(case)) + limit) * 2.0**-bits + least)


def exact(case: Case) -> np.ndarray:
    shared = {key: case[key] for key in ("codes", "scales", "table", "zero_points", "rows", "columns", "group")}
    return case["x"].astype(np.float64) @ dequantize(**shared) + case["bias"]


def check(products: Products, case: Case, seeds: tuple[int, ...] = (0, 1)) -> None:
    """Within the bound, and with the same bits whatever order threads run in."""
    for sm90a in kinds_of_gpu(products, case):
        ys = [products.table(case, seed, sm90a=sm90a) for seed in seeds]
        assert ys[0].shape == (*case["x"].shape[:-1], case["columns"])
        assert all(y.tobytes() == ys[0].tobytes() for y in ys)
        limit = limit_of(case, sm90a=sm90a)
        assert (np.abs(ys[0].astype(np.float64) - exact(case)) <= limit).all()


def kinds_of_gpu(products: Products, case: Case) -> list[bool]:
    """Whether to run as on sm_90a: in the interpreter both ways where that has a kernel of its own for these rows.

    A table with an offset, which only pack.cc knows, has none; its results are then the same twice.
    """
    many = np.prod(case["x"].shape[:-1]) > 16 and (case["group"] % 128 == 0 or case["group"] >= case["rows"])
    of_floats = (case["activations"], case["x"].dtype) == ("float32", np.float16)
    has_kernel = bool(many and (case["activations"] == "int8" or of_floats) and not case["zero_points"].any())
    return [has_kernel] if products.library.on_gpu else [False, True][: 1 + has_kernel]


# the type of x and the mode say together what is multiplied, so they are one choice here
@pytest.mark.parametrize(("operands", "bits", "count"), pairwise([*product(ON_GPUS, TYPES)], range(1, 9), [1, 13, 19]))
def test_it_is_within_the_bound(products: Products, operands: tuple[str, type], bits: int, count: int) -> None:
    """Few rows and tiles of them; K, N and group fill nothing up, and groups end within blocks of K."""
    activations, dtype = operands
    case = case_of(
        100,
        37,
        48,
        bits,
        leading=(count,),
        zero_points=(bits + count) % 2 == 0,
        bias=True,
        scale_type=[np.float16, np.float32][count % 2],
    )
    check(products, {**case, "x": case["x"].astype(dtype), "activations": activations}, seeds=(count,))


@pytest.mark.parametrize(
    ("shape", "activations", "dtype"),
    pairwise([(5, 17, 16), (1040, 20, 1040), (1168, 48, 128), (1200, 33, 592)], ON_GPUS, TYPES),
)
def test_groups_that_are_ragged_long_or_the_whole_column(
    products: Products, shape: tuple[int, int, int], activations: str, dtype: type
) -> None:
    for count in (3, 17):
        case = case_of(*shape, 6, leading=(count,), zero_points=count == 3)
        check(products, {**case, "x": case["x"].astype(dtype), "activations": activations})


@pytest.mark.parametrize(("dtype", "activations"), [(np.float16, "float32"), (np.float32, "int8")])
@pytest.mark.parametrize("name", ["int4", "uint4", "int8", "uint8", "fp4", "fp6-e2m3", "fp6-e3m2", "nf4"])
@pytest.mark.parametrize("count", [9, 70])
def test_formats_with_decoders_of_their_own(
    products: Products, name: str, count: int, dtype: type, activations: str
) -> None:
    """In full blocks of K and behind them; tiles cut K into parts that are summed up."""
    table = FORMATS[name].table
    case = {**case_of(1100, 40, 128, FORMATS[name].bits, leading=(count,)), "table": np.array(table, np.float32)}
    check(products, {**case, "x": case["x"].astype(dtype), "activations": activations}, seeds=(2,))


# what each decoder reads, with columns that 16-byte stores take whole and with such that they do not
@pytest.mark.parametrize(("dtype", "activations"), [(np.float16, "float32"), (np.float16, "int8")])
@pytest.mark.parametrize(
    ("name", "columns"), [("int4", 272), ("uint4", 34), ("int8", 40), ("fp6-e2m3", 264), ("fp6-e3m2", 33), ("nf4", 47)]
)
@pytest.mark.parametrize("count", [70, 130])
def test_tiles_of_many_rows(
    products: Products, name: str, columns: int, count: int, dtype: type, activations: str
) -> None:
    """One tile of rows or two, the last one not full, narrow or wide; K in one part, which fills no block up."""
    table = np.array(FORMATS[name].table, np.float32)
    case = case_of(300, columns, 128, FORMATS[name].bits, leading=(count,), bias=True, scale_type=np.float16)
    check(products, {**case, "table": table, "x": case["x"].astype(dtype), "activations": activations}, seeds=(3,))


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_weights_of_any_size_keep_their_digits_on_sm90a(products: Products, size: float) -> None:
    """Scales that float16 holds with few digits or not at all: a power of two brings them there, and the sums back."""
    case = {**case_of(128, 24, 128, 4, leading=(17,)), "activations": "float32"}
    case["scales"] = case["scales"] * np.float32(size)
    case["x"] = (case["x"] * np.float32(1e4 if size < 1 else 1e-5)).astype(np.float16)
    y = products.table(case, sm90a=True).astype(np.float64)
    assert (np.abs(y - exact(case)) <= limit_of(case, sm90a=True)).all()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=any_case(ON_GPUS), dtype=st.sampled_from(TYPES), seed=st.integers(0, 2**31))
def test_any_product(products: Products, case: Case, dtype: type, seed: int) -> None:
    case.pop("minimums", None)  # which no kernel on a GPU has; its numbers are as good as zero points
    check(products, {**case, "x": case["x"].astype(dtype)}, seeds=(seed, seed + 1))


@EACH_TYPE
@pytest.mark.parametrize("frozen", load("matmul_table"), ids=lambda frozen: f"{frozen['bits']} bits")
def test_frozen_vectors(products: Products, frozen: dict, dtype: type) -> None:
    """Bit for bit: every number is an integer or a half, and 8 significant bits hold those of x and the table."""
    case, _ = inputs_of(frozen)
    case["x"] = case["x"].astype(dtype)
    with np.errstate(over="ignore"):  # beyond float16 is infinite
        expected = np.array(frozen["y"]).astype(dtype)
    for activations in ON_GPUS:
        assert np.array_equal(products.table({**case, "activations": activations}), expected)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("activations", ["int8", "int16"])
def test_integers_are_exact_within_a_group(products: Products, name: str, activations: str) -> None:
    """Nothing but a few float32 operations for each group is between the kernel and the reference."""
    bits = (len(TABLES[name]) - 1).bit_length()
    case = {**case_of(520, 40, 128, bits, leading=(20,)), "activations": activations}
    case["table"] = np.array(TABLES[name], np.float32)
    y = products.table(case)
    assert (np.abs(y - reference(**case)) <= of_float32(case)).all()


@EACH_TYPE
@pytest.mark.parametrize("activations", ["int8", "int16"])
def test_a_row_is_the_same_whatever_stands_beside_it(products: Products, activations: str, dtype: type) -> None:
    """Few rows and many take other kernels, which cut K otherwise: of one group they make the same bits."""
    case = {**case_of(128, 40, 128, 6, leading=(40,)), "activations": activations}
    case |= {"table": np.array(TABLES["e2m3"], np.float32), "x": case["x"].astype(dtype)}
    y = products.table(case)
    for size in (1, 7, 17):
        parts = [products.table({**case, "x": case["x"][at : at + size]}) for at in range(0, 40, size)]
        assert np.array_equal(np.concatenate(parts), y)


@EACH_TYPE
@EACH_MODE
@pytest.mark.parametrize("shift", [1, 4])
def test_an_x_that_lies_anywhere(products: Products, activations: str, dtype: type, shift: int) -> None:
    case = {**case_of(48, 20, 16, 4), "activations": activations}
    case["x"] = case["x"].astype(dtype)
    assert np.array_equal(products.table(case, shift=shift), products.table(case))


@pytest.mark.parametrize("activations", ON_GPUS)
def test_parts_of_k_are_summed_up(products: Products, activations: str) -> None:
    """A long K and few columns: blocks of threads have a part of K each."""
    case = {**case_of(8300, 20, 8300, 5, leading=(2,), bias=True), "activations": activations}
    check(products, case)


def test_float32_is_within_two_millionths(products: Products) -> None:
    case = {**case_of(11008, 16, 128, 6, leading=(4,)), "activations": "float32"}
    expected = reference(**case)
    assert np.abs(products.table(case) - expected).max() <= 2e-6 * np.abs(expected).max()


@EACH_TYPE
@EACH_MODE
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("count", [1, 20])
def test_what_is_not_finite_stays_in_its_row(
    products: Products, activations: str, bad: float, count: int, dtype: type
) -> None:
    case = {**case_of(64, 32, 32, 4, leading=(count,)), "activations": activations}
    case["x"] = case["x"].astype(dtype)
    case["x"][count // 2, 40] = bad
    y = products.table(case).astype(np.float32)
    assert not np.isfinite(y[count // 2]).any()
    assert np.isfinite(np.delete(y, count // 2, axis=0)).all()


@EACH_MODE
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-32, 1e25])
def test_huge_tiny_and_zero(products: Products, activations: str, size: float) -> None:
    case = {**case_of(64, 32, 32, 4, leading=(3,)), "activations": activations}
    case["x"] *= np.float32(size)
    check(products, case)


@pytest.mark.parametrize("size", [1e-30, 1e-5, 1e5, 1e30])
def test_a_table_beyond_float16_is_scaled(products: Products, size: float) -> None:
    case = {**case_of(64, 32, 32, 5, leading=(3,)), "activations": "float32"}
    case["table"] *= np.float32(size)
    case["scales"] = case["scales"] / np.float32(size)
    case["x"] = case["x"].astype(np.float16)
    check(products, case)


def test_codes_past_the_table_are_code_0(products: Products) -> None:
    """The operator refuses them; a kernel must not read past a table all the same."""
    case = {**case_of(64, 32, 32, 3, entries=8), "activations": "float32"}
    expected = reference(**{**case, "table": np.where(np.arange(8) < 5, case["table"], case["table"][0])})
    y = products.table({**case, "table": case["table"][:5]})
    assert np.allclose(y, expected, rtol=0, atol=64 * 8 * UNIT * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "float16", "int8"),
    [
        ("int4", "int4", "int4"),
        ("uint4", "int4", "int4"),
        ("int8", "int8", "int8"),
        ("uint8", "int8", "int8"),
        ("fp6-e3m2", "e3m2", "wide"),
        ("fp6-e2m3", "e2m3", "table"),
        ("nf4", "table4", "wide"),
        ("fp4", "table4", "table4"),
        ("int5", "table", "table"),
    ],
)
def test_each_format_has_its_decoder(products: Products, name: str, float16: str, int8: str) -> None:
    values = FORMATS[name].table
    case = {**case_of(16, 16, 16, FORMATS[name].bits), "table": np.array(values, np.float32)}
    assert DECODERS[products.pack(case, "float16")[0].decoder] == float16
    assert DECODERS[products.pack(case, "int8")[0].decoder] == int8
