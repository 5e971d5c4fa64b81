"""The native kernels of MatMulTable and MatMulDynamic against their references, on every set of instructions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings

from graphopt.errors import InputError
from graphopt.numerics.formats import FORMATS
from graphopt.numerics.rotations import hadamard
from graphopt.runtime_ops import library_path
from graphopt.runtime_ops.dequantize.spec.op import reference as dequantized
from graphopt.runtime_ops.instructions import ISA_VARIABLE
from graphopt.runtime_ops.matmul_dynamic.spec.op import MATMUL_DYNAMIC
from graphopt.runtime_ops.matmul_dynamic.spec.op import reference as dynamic_reference
from graphopt.runtime_ops.matmul_table.spec.activations import MODES, SYMMETRIC
from graphopt.runtime_ops.matmul_table.spec.op import MATMUL_TABLE, dequantize, reference
from graphopt.runtime_ops.matmul_table.spec.packing import unpack, untile
from tests.native import here, needs_library
from tests.pairwise import pairwise
from tests.runtime_ops.matmul_dynamic.bound import bound as dynamic_bound
from tests.runtime_ops.matmul_table.bound import bound
from tests.runtime_ops.matmul_table.test_op import of_float32
from tests.runtime_ops.matmul_table.test_vectors import inputs_of, load, trellis_of
from tests.runtime_ops.products import Case, any_case, as_bytes, case_of, model_of, run_body, trellis_case

pytestmark = needs_library

INTEGERS = ("int8", "int16", "uint4")
TABLES = {
    "int4": [float(code if code < 8 else code - 16) for code in range(16)],
    "e2m3": [s * (m / 8 if not e else (1 + m / 8) * 2 ** (e - 1)) for s in (1, -1) for e in range(4) for m in range(8)],
    "e3m2": [
        s * (m / 16 if not e else (1 + m / 4) * 2 ** (e - 3)) for s in (1, -1) for e in range(8) for m in range(4)
    ],
}
OTHER_TABLES = {
    "int8": [float(code if code < 128 else code - 256) for code in range(256)],
    "int8 in order": [code - 128.0 for code in range(256)],
    "uint8": [float(code) for code in range(256)],
    "even, backwards": [510.0 - 2 * code for code in range(256)],
    "seven bits around 60": [code - 60.0 for code in range(128)],
    "signs, 15 steps": [float(sign * code) for sign in (1, -1) for code in range(16)],
    "signs, 210 steps": [sign * code * 7.0 for sign in (1, -1) for code in range(16)],
    "huge steps": [code * 2.0**40 for code in range(8)],
    "nf4": list(FORMATS["nf4"].table),
    "float8": list(FORMATS["fp8-e4m3"].table),
}
"""One for each way in which a kernel reads a table."""


class Kernel:
    """Sessions on a product with the library, with the given set of instructions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def session(
        self, name: str, case: Case, isa: str = "", threads: int = 2, fed: Sequence[str] = ()
    ) -> onnxruntime.InferenceSession:
        self.monkeypatch.setenv(ISA_VARIABLE, isa)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = threads
        options.register_custom_ops_library(str(library_path()))
        serialized = ir.to_proto(model_of(name, case, fed=fed, has_body=False)).SerializeToString()
        return onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])

    def __call__(self, name: str, case: Case, isa: str = "", threads: int = 2, fed: Sequence[str] = ()) -> np.ndarray:
        feeds = {key: case[key] for key in ("x", *fed)}
        return self.session(name, case, isa, threads, fed).run(None, feeds)[0]


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Kernel(monkeypatch)


def check(kernel: Kernel, case: Case, isas: Sequence[str] = ()) -> None:
    """Each set of instructions, or ``isas``, is within the derived bound; sums of integers have the same bits."""
    names = ("codes", "scales", "table", "zero_points", "rows", "columns", "group", "minimums")
    exact = case["x"].astype(np.float64) @ dequantize(**{name: case[name] for name in names if name in case})
    exact += case["bias"]
    results = [kernel(MATMUL_TABLE.name, case, isa) for isa in isas or here()]
    limit = bound(**case)
    for y in results:
        assert (y.shape, y.dtype) == (exact.shape, np.float32)
        assert (np.abs(y - exact) <= limit).all()
    if case["activations"] in INTEGERS:
        assert all(np.array_equal(y, results[0]) for y in results)


@pytest.mark.parametrize(("bits", "activations", "count"), pairwise(range(1, 9), MODES, [1, 2, 3, 8, 13, 30, 40]))
def test_it_is_the_reference(kernel: Kernel, bits: int, activations: str, count: int) -> None:
    """For one row, few rows and many rows, which different loops compute; K, N and group fill nothing up."""
    case = case_of(
        100,
        37,
        48,
        bits,
        leading=(count,),
        zero_points=bits % 2 == 0,
        bias=True,
        scale_type=[np.float16, np.float32][count % 2],
    )
    check(kernel, {**case, "activations": activations})


@pytest.mark.parametrize("activations", MODES)
@pytest.mark.parametrize("shape", [(16, 16, 16), (5, 17, 16), (1040, 20, 1040), (2064, 48, 128), (1200, 33, 592)])
def test_groups_that_are_ragged_long_or_the_whole_column(
    kernel: Kernel, activations: str, shape: tuple[int, int, int]
) -> None:
    for count in (1, 17):
        for minimums in (False, True):
            case = case_of(*shape, 6, leading=(count,), zero_points=True, minimums=minimums)
            check(kernel, {**case, "activations": activations})


@pytest.mark.parametrize(
    ("group", "activations", "count", "largest"),
    pairwise([32, 64, 96, 512], INTEGERS, [1, 2, 3, 6, 7, 17, 36, 37], [15, 16, 17, 31]),
)
def test_groups_of_32_rows_or_of_several_such(
    kernel: Kernel, group: int, activations: str, count: int, largest: int
) -> None:
    """AVX2 sums 32 rows up in 16 bits where bytes are 16 at most: nearly all are the largest, and a row of x is 127."""
    case = {**case_of(2 * group, 37, group, 4, leading=(count,)), "activations": activations}
    case["table"] = np.array([0, 1, *[largest] * 14], np.float32)
    case["x"][0] = 1
    check(kernel, case)


@pytest.mark.parametrize("activations", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", [*TABLES, *OTHER_TABLES])
def test_every_kind_of_table(kernel: Kernel, name: str, activations: str) -> None:
    # floats have few kinds of scalar kernels, which other tests run
    isas = here() if activations in INTEGERS else here()[1:]
    table = np.array({**TABLES, **OTHER_TABLES}[name], np.float32)
    bits = (len(table) - 1).bit_length()
    for count, zero_points in ((1, activations == "float32"), (7, False)):
        case = case_of(176, 37, 64, bits, leading=(count,), zero_points=zero_points)
        check(kernel, {**case, "table": table, "activations": activations}, isas)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=any_case())
def test_any_product(kernel: Kernel, case: Case) -> None:
    check(kernel, case)


@pytest.mark.parametrize(
    ("bits", "activations", "count", "columns"),
    pairwise(range(2, 7), MODES, [1, 2, 3, 8, 13], [64, 47, 30, 1]),
)
def test_a_trellis_is_its_bytes(kernel: Kernel, bits: int, activations: str, count: int, columns: int) -> None:
    """The same weight as codes of 8 bits gives the same integers; floats differ by the order of their sums."""
    points = bits % 2 == 0
    case = trellis_case(200, columns, 48, bits, leading=(count,), bias=True, zero_points=points)
    case["activations"] = activations
    results = [kernel(MATMUL_TABLE.name, case, isa) for isa in here()]
    expected, limit = kernel(MATMUL_TABLE.name, as_bytes(case)), bound(**as_bytes(case))
    for y in results:
        if activations in INTEGERS:
            np.testing.assert_array_equal(y, expected)
        assert (np.abs(y - expected) <= 2 * limit).all()


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(
    ("head", "tail"),
    [((-64, 65), (-20, 44)), ((-64, 66), (-32, 32)), ((-90, -20), (-37, 28)), ((100, 180), (-97, -53))],
)
def test_halves_of_a_trellis_that_may_be_summed_up_apart(
    kernel: Kernel, bits: int, head: tuple[int, int], tail: tuple[int, int]
) -> None:
    """Tables of any reach whose sums are bytes, the largest x: sums of 16 bits hold as much, or are not used."""
    case, random = trellis_case(96, 47, 96, bits), np.random.default_rng(0)
    tables = np.array([random.integers(least, most + 1, 16) for least, most in (head, tail)])
    tables[:, :2] = [head, tail]
    case |= {"table": (tables / 32).astype(np.float32), "activations": "int8"}
    case["x"] = random.choice(np.array([-127, 127], np.float32), case["x"].shape)
    expected = kernel(MATMUL_TABLE.name, as_bytes(case))
    for isa in here():
        np.testing.assert_array_equal(kernel(MATMUL_TABLE.name, case, isa), expected)


def either(name: str, count: int, scale_type: type) -> Case:
    """A case of the operator called ``name``, with a rotation where it takes one."""
    case = case_of(96, 37, 48, 6, leading=(count,), zero_points=True, bias=True, scale_type=scale_type)
    of_dynamic = {"left": hadamard(12), "right": hadamard(4), "bits": 8, "clip": 0.9}
    return case | ({"activations": "int8"} if name == MATMUL_TABLE.name else of_dynamic)


@pytest.mark.parametrize("name", [MATMUL_TABLE.name, MATMUL_DYNAMIC.name])
@pytest.mark.parametrize("scale_type", [np.float16, np.float32])
@pytest.mark.parametrize("count", [0, 1, 20])
def test_an_x_of_float16_is_multiplied_as_floats(kernel: Kernel, name: str, scale_type: type, count: int) -> None:
    case = either(name, count, scale_type)
    halves = case["x"].astype(np.float16)
    wide = kernel(name, {**case, "x": halves.astype(np.float32)})
    y, by_body = kernel(name, {**case, "x": halves}), run_body(name, {**case, "x": halves})
    assert y.dtype == by_body.dtype == np.float16
    assert y.shape == by_body.shape == (count, 37)
    if not count:
        return
    assert np.array_equal(y, wide.astype(np.float16))
    limit = (bound if name == MATMUL_TABLE.name else dynamic_bound)(**{**case, "x": halves.astype(np.float32)})
    # both have the bound of the operator, and are rounded: half a last place, which is 2^-11 of a number
    largest = np.abs(wide) + 2 * limit
    assert (np.abs(y.astype(np.float64) - by_body) <= 2 * limit + 2 * 2.0**-11 * largest + 2.0**-24).all()


@pytest.mark.parametrize("name", [MATMUL_TABLE.name, MATMUL_DYNAMIC.name])
@pytest.mark.parametrize("fed", [("scales", "zero_points"), ("scales",), ("zero_points",)])
def test_scales_may_be_computed(kernel: Kernel, name: str, fed: tuple[str, ...]) -> None:
    """As onnxruntime does to them where a node of float16 stands between nodes of float32."""
    for count in (1, 20):
        case = either(name, count, np.float32)
        session = kernel.session(name, case, fed=fed)
        for factor in (1, -3):
            given = {**case, **{key: case[key] * np.float32(factor) for key in fed}}
            found = session.run(None, {key: given[key] for key in ("x", *fed)})[0]
            assert np.array_equal(found, kernel(name, given))


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("activations", INTEGERS)
def test_integers_do_not_depend_on_threads_or_on_the_rows_beside(kernel: Kernel, name: str, activations: str) -> None:
    bits = (len(TABLES[name]) - 1).bit_length()
    case = {**case_of(520, 200, 128, bits, leading=(30,)), "activations": activations}
    case["table"] = np.array(TABLES[name], np.float32)
    whole = kernel(MATMUL_TABLE.name, case, threads=1)
    assert np.array_equal(kernel(MATMUL_TABLE.name, case, threads=2), whole)
    session = kernel.session(MATMUL_TABLE.name, case)
    for size in (1, 2, 5, 7, 11):
        parts = [session.run(None, {"x": case["x"][at : at + size]})[0] for at in range(0, 30, size)]
        assert np.array_equal(np.concatenate(parts), whole)
    # such tables are integers, so that nothing but the rounding of x is between the kernel and the reference
    limit = of_float32(case)
    assert (np.abs(whole - reference(**case)) <= limit).all()


def test_float32_is_within_two_millionths(kernel: Kernel) -> None:
    """The issue's figure: of the largest product, for sums of 11008 numbers."""
    case = {**case_of(11008, 64, 128, 6, leading=(4,)), "activations": "float32"}
    expected = reference(**case)
    for isa in here():
        assert np.abs(kernel(MATMUL_TABLE.name, case, isa) - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("activations", MODES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("count", [1, 14])
def test_what_is_not_finite_stays_in_its_row(kernel: Kernel, activations: str, bad: float, count: int) -> None:
    case = {**case_of(64, 32, 32, 4, leading=(count,)), "activations": activations}
    case["x"][count // 2, 40] = bad
    for isa in here():
        y = kernel(MATMUL_TABLE.name, case, isa)
        assert not np.isfinite(y[count // 2]).any()
        assert np.isfinite(np.delete(y, count // 2, axis=0)).all()


@pytest.mark.parametrize("activations", MODES)
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-32, 1e25])
def test_huge_tiny_and_zero(kernel: Kernel, activations: str, size: float) -> None:
    case = {**case_of(64, 32, 32, 4, leading=(3,)), "activations": activations}
    case["x"] *= np.float32(size)
    check(kernel, case)


@pytest.mark.parametrize("frozen", load("matmul_table"), ids=lambda frozen: f"{frozen['bits']} bits")
def test_frozen_vectors(kernel: Kernel, frozen: dict) -> None:
    # Their x are codes of int8 and int16; four bits hold less.
    case, _ = inputs_of(frozen)
    for activations in SYMMETRIC:
        for isa in here():
            assert kernel(MATMUL_TABLE.name, {**case, "activations": activations}, isa).tolist() == frozen["y"]


@pytest.mark.parametrize("frozen", load("matmul_table", "trellis1.json"), ids=lambda frozen: str(frozen["rows"]))
def test_frozen_trellises(kernel: Kernel, frozen: dict) -> None:
    case = {**trellis_of(frozen), "activations": "float32"}
    if case["group"] % 16 and case["group"] != case["rows"]:
        with pytest.raises(Exception, match="group must be a multiple of 16"):
            kernel(MATMUL_TABLE.name, case)
        return
    for isa in here():
        assert kernel(MATMUL_TABLE.name, case, isa).tolist() == frozen["W"]


@pytest.mark.parametrize("isa", ["", "scalar"])
@pytest.mark.parametrize("scale_type", [np.float16, np.float32])
def test_minimums_give_the_weight_of_the_definition_to_the_last_bit(kernel: Kernel, isa: str, scale_type: type) -> None:
    case = {**case_of(96, 37, 32, 4, minimums=True, scale_type=scale_type), "activations": "float32"}
    case["table"] = np.arange(16, dtype=np.float32)
    case["x"] = np.eye(96, dtype=np.float32)
    codes = unpack(case["codes"], 96, 37)
    logical = (codes, untile(case["scales"], 37), case["table"], untile(case["zero_points"], 37))
    assert np.array_equal(kernel(MATMUL_TABLE.name, case, isa), dequantized(*logical, 32, 1))
    assert np.array_equal(run_body(MATMUL_TABLE.name, case), dequantized(*logical, 32, 1))


@pytest.mark.parametrize(
    ("bits", "clip", "weight_bits", "orders"), pairwise([8, 4], [1.0, 0.8], [4, 6, 8], [(1, 1), (12, 8), (8, 4)])
)
def test_dynamic(kernel: Kernel, bits: int, clip: float, weight_bits: int, orders: tuple[int, int]) -> None:
    left, right = (hadamard(order) for order in orders)
    for count, minimums in ((1, False), (5, False), (14, False), (5, True)):
        case = case_of(96, 40, 96, weight_bits, leading=(count,), minimums=minimums)
        case |= {"left": left, "right": right}
        case |= {"bits": bits, "clip": clip, "table": np.arange(2**weight_bits, dtype=np.float32) - 8}
        expected, limit = dynamic_reference(**case), dynamic_bound(**case)
        results = [kernel(MATMUL_DYNAMIC.name, case, isa) for isa in here()]
        for y in results:
            assert np.array_equal(y, results[0])
            # both are within the bound of the exact product, so of each other within twice that
            assert (np.abs(y - expected) <= 2 * limit).all()
        if orders == (1, 1):  # nothing but float32 sums is between kernel and body: no code of x can be another
            assert np.abs(results[0] - run_body(MATMUL_DYNAMIC.name, case)).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_dynamic_of_a_trellis_is_of_its_bytes(kernel: Kernel, bits: int) -> None:
    for count, activation_bits in ((1, 8), (5, 4), (14, 8)):
        case = trellis_case(96, 37, 96, bits, leading=(count,))
        case |= {"left": hadamard(12), "right": hadamard(8), "bits": activation_bits, "clip": 0.9}
        expected = kernel(MATMUL_DYNAMIC.name, as_bytes(case))
        for isa in here():
            assert np.array_equal(kernel(MATMUL_DYNAMIC.name, case, isa), expected)
    by_body = run_body(MATMUL_DYNAMIC.name, case)
    assert np.abs(by_body - expected).max() <= 2 * dynamic_bound(**as_bytes(case)).max()


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "rows": ({"rows": 0}, "rows and columns must be from 1 to 2\\^31"),
    "huge columns": ({"columns": 2**62}, "rows and columns must be from 1 to 2\\^31"),
    "group": ({"group": 24}, "group must be a multiple of 16, or all 64 rows, it is 24"),
    "codes": ({"codes": np.zeros((2, 3, 128), np.uint8)}, "codes must have the shape \\[2, 4, 32 \\* bits\\]"),
    "bits": ({"codes": np.zeros((2, 4, 120), np.uint8)}, "codes must have the shape"),
    "scales": ({"scales": np.ones((2, 3, 16), np.float32)}, "scales must have the shape \\[2, 2, 16\\]"),
    "zero points": ({"zero_points": np.ones((1, 1, 1), np.float32)}, "zero_points must be \\[\\[\\[0\\]\\]\\]"),
    "type of minimums": ({"minimums": 1.0}, "its attribute minimums is of another type than it must be"),
    "bias": ({"bias": np.ones(3, np.float32)}, "bias must be \\[0\\], or have 32 numbers"),
    "table": ({"table": np.zeros(17, np.float32)}, "table must have from 1 to 16 numbers"),
    "entry": ({"table": np.full(16, np.nan, np.float32)}, "entry 0 of the table is no finite number"),
    "code": ({"table": np.zeros(9, np.float32)}, "a code is 15, in a table of 9 numbers"),
    "activations": ({"activations": "int7"}, "activations must be float32, bfloat16, int8, int16 or uint4, not 'int7'"),
    "long activations": ({"activations": "int7" * 9}, "its attribute activations must be there, and be a short string"),
}


WRONG_TRELLISES: dict[str, tuple[dict[str, object], str]] = {
    "flag": ({"trellis": 2}, "trellis must be 0 or 1, it is 2"),
    "minimums": ({"minimums": 1}, "a trellis has no minimums"),
    "bits": ({"codes": np.zeros((2, 4, 32), np.uint8)}, "codes of a trellis have 2 to 6 bits, not 1"),
    "one table": ({"table": np.ones(16, np.float32)}, "table must have the shape \\[2, 16\\], for a trellis of 3 bits"),
    "entries": ({"table": np.ones((2, 8), np.float32)}, "table must have the shape \\[2, 16\\]"),
    "entry": ({"table": np.full((2, 16), np.inf, np.float32)}, "entry 0 of the table is no finite number"),
    "sums": ({"table": np.arange(32, dtype=np.float32).reshape(2, 16) * 5}, "the sums of a trellis must be multiples"),
    "step": ({"table": np.full((2, 16), 2.0**-17, np.float32)}, "the sums of a trellis must be multiples"),
    "reach": ({"table": np.repeat(np.float32([[2**16 + 1], [-(2**16)]]), 16, 1)}, "the sums of a trellis must be"),
}


@pytest.mark.parametrize("what", WRONG_TRELLISES)
def test_what_a_file_lies_about_a_trellis_is_an_error(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    changes, message = WRONG_TRELLISES[what]
    case = {**trellis_case(64, 32, 32, 3), "activations": "int8", **changes}
    monkeypatch.setattr("tests.runtime_ops.products.declare", lambda model: None)
    with pytest.raises(Exception, match=f"ai.graphopt node 'product': {message}"):
        kernel.session(MATMUL_TABLE.name, case)


@pytest.mark.parametrize("what", WRONG)
def test_what_a_file_lies_about_is_an_error_that_names_the_node(kernel: Kernel, what: str) -> None:
    changes, message = WRONG[what]
    case = {**case_of(64, 32, 32, 4), "activations": "int8", **changes}
    with pytest.raises(Exception, match=f"ai.graphopt node 'product': {message}"):
        kernel.session(MATMUL_TABLE.name, case)


def test_minimums_are_one_or_none(kernel: Kernel) -> None:
    case = {**case_of(64, 32, 32, 4), "activations": "int8", "minimums": 2}
    with pytest.raises(InputError, match="has no body for its attributes: minimums must be 0 or 1, it is 2"):
        model_of(MATMUL_TABLE.name, case)
    with pytest.raises(Exception, match="ai.graphopt node 'product': minimums must be 0 or 1, it is 2"):
        kernel.session(MATMUL_TABLE.name, case)


def test_an_x_of_another_width_is_an_error_that_names_the_node(kernel: Kernel) -> None:
    case = {**case_of(64, 32, 32, 4), "activations": "int8"}
    model = model_of(MATMUL_TABLE.name, case)
    model.graph.inputs[0].shape = ir.Shape(["rows", "width"])
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library_path()))
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    with pytest.raises(Exception, match="'product': the last axis of x must have 64 numbers"):
        session.run(None, {"x": np.ones((2, 65), np.float32)})
