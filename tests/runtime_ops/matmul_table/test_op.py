from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphopt.runtime_ops import DOMAIN, OPERATORS
from graphopt.runtime_ops.matmul_table.spec.activations import MODES, round_activations, to_bfloat16
from graphopt.runtime_ops.matmul_table.spec.op import MATMUL_TABLE, reference
from tests.pairwise import pairwise
from tests.runtime_ops.matmul_table.bound import product_bound
from tests.runtime_ops.products import Case, as_bytes, case_of, model_of, run_body, trellis_case

NAME = MATMUL_TABLE.name
EACH_MODE = pytest.mark.parametrize("activations", MODES)

# K, N and group: one unit; no multiples of 16; a ragged last group; a scale per column; a group beyond K
SHAPES = [(16, 16, 16), (37, 50, 16), (80, 20, 32), (45, 3, 45), (5, 17, 16)]


def of_float32(case: Case) -> np.ndarray:
    """The error bound of float32 sums: x and the table are rounded already, so it has no other term."""
    x = round_activations(case["x"], case["group"], case["activations"])
    table = to_bfloat16(case["table"]) if case["activations"] == "bfloat16" else case["table"]
    rest = {key: value for key, value in case.items() if key not in ("x", "table", "activations")}
    nothing = np.zeros(len(table))
    return product_bound(x, np.zeros_like(x), table=table, table_off=nothing, levels=0, **rest)


def check(case: Case, opset: int = 23) -> None:
    y, expected = run_body(NAME, case, opset), reference(**case)
    assert y.shape == expected.shape
    assert y.dtype == np.float32
    assert (np.abs(y - expected) <= of_float32(case)).all()


@pytest.mark.parametrize(("bits", "activations", "shape"), pairwise(range(1, 9), MODES, SHAPES[:3]))
def test_body_is_the_reference(bits: int, activations: str, shape: tuple[int, int, int]) -> None:
    case = case_of(
        *shape, bits, zero_points=bits % 2 == 0, bias=bits % 3 == 0, scale_type=[np.float16, np.float32][bits % 2]
    )
    check({**case, "activations": activations})
    if bits % 4 == 0:
        check({**case, "minimums": 1, "activations": activations})


@pytest.mark.parametrize(("activations", "shape", "leading"), pairwise(MODES, SHAPES, [(), (2, 3), (0,), (2, 0)]))
def test_any_rank_and_no_rows(activations: str, shape: tuple[int, int, int], leading: tuple[int, ...]) -> None:
    check({**case_of(*shape, 3, leading=leading, bias=True, zero_points=True), "activations": activations})


@pytest.mark.parametrize(("bits", "activations", "columns"), pairwise(range(2, 7), MODES, [48, 37, 3]))
def test_the_body_of_a_trellis_is_its_bytes(bits: int, activations: str, columns: int) -> None:
    case = {**trellis_case(40, columns, 16, bits, zero_points=bits == 3), "activations": activations}
    y, expected = run_body(NAME, case), reference(**case)
    np.testing.assert_array_equal(expected, reference(**as_bytes(case)))
    assert (np.abs(y - expected) <= of_float32(as_bytes(case))).all()


@pytest.mark.parametrize("entries", [1, 3])
def test_fewer_entries_than_codes(entries: int) -> None:
    check({**case_of(20, 20, 20, 2, entries=entries), "activations": "int8"})


def test_a_code_without_an_entry_is_an_error() -> None:
    case = {**case_of(20, 20, 20, 2), "activations": "float32"}
    case["table"] = case["table"][:3]
    with pytest.raises(IndexError):
        reference(**case)
    with pytest.raises(Exception, match="Gather"):
        run_body(NAME, case)


def test_an_unknown_rounding_is_an_error() -> None:
    case = {**case_of(20, 20, 20, 2), "activations": "int7"}
    with pytest.raises(ValueError, match="activations are float32, bfloat16, int8, int16, uint4, not 'int7'"):
        reference(**case)
    with pytest.raises(Exception, match="Gather"):
        run_body(NAME, case)


@pytest.mark.parametrize("wrong", [{"scales": np.ones((2, 3, 16), np.float32)}, {"rows": 70}, {"columns": 40}])
def test_the_reference_refuses_shapes_that_do_not_fit(wrong: Case) -> None:
    with pytest.raises(ValueError, match=r"scales|codes"):
        reference(**{**case_of(40, 20, 32, 2), "activations": "float32", **wrong})


@EACH_MODE
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_in_its_row(activations: str, bad: float) -> None:
    case = {**case_of(37, 5, 16, 4, leading=(3,)), "activations": activations}
    tame = run_body(NAME, case)
    case["x"][1, 20] = bad
    for y in (run_body(NAME, case), reference(**case)):
        assert not np.isfinite(y[1]).any()
        assert np.isnan(y[1]).all() or activations in ("float32", "bfloat16")
        assert np.abs(y[[0, 2]] - tame[[0, 2]]).max() <= 1e-5  # as far as float32 and float64 are apart here


@EACH_MODE
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-31, 1e-29, 1e30])
def test_huge_and_tiny(activations: str, size: float) -> None:
    case = {**case_of(37, 5, 16, 4), "activations": activations}
    case["x"] *= np.float32(size)
    check(case)


def test_rounding_by_hand() -> None:
    # m = 4: 127 x / 4 is 127, 63.5, 31.75 and -0.5, and ties go to even
    x = np.array([[4, 2, 1, -1 / 63.5]], np.float32)
    assert np.abs(round_activations(x, 4, "int8") - np.array([127, 64, 32, 0]) * 4 / 127).max() < 4 * 2**-24
    # two groups, the second with m = 2^-110, which is a group of zeros
    x = np.array([[16256, 1.4, 2.0**-110, 0]], np.float32)
    assert round_activations(x, 2, "int16").tolist() == [[16256, 1, 0, 0]]
    # low = -5 and high = 10: a step of 1 and a zero point of 5; 0.5 and 1.5 are ties
    x = np.array([[-5, 10, 0.5, 1.5, -4.4, 9.6]], np.float32)
    assert round_activations(x, 6, "uint4").tolist() == [[-5, 10, 0, 2, -4, 10]]
    # 0 belongs to a range that does not reach it, with code 0 or 15
    assert round_activations(np.array([[30, 16, -15, -8.6]], np.float32), 2, "uint4").tolist() == [[30, 16, -15, -9]]
    # of a range with ties at both ends one is cut off: steps of 2, -1 and 29 are -0.5 and 14.5, which go to 0 and 14
    assert round_activations(np.array([[-1, 29]], np.float32), 2, "uint4").tolist() == [[0, 28]]
    # -11 and 19 are -5.5 and 9.5: z = 6, and the largest code is 9
    assert round_activations(np.array([[-11, 19]], np.float32), 2, "uint4").tolist() == [[-12, 18]]
    # 8 bits of bfloat16: between 1 and 1 + 2^-7 the tie goes to 1, the next one to 1 + 2^-6
    assert round_activations(np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32), 2, "bfloat16").tolist() == [1, 1 + 2**-6]


@pytest.mark.parametrize("opset", [23, 24, 25, 26])
@EACH_MODE
def test_the_body_is_standard_onnx(opset: int, activations: str) -> None:
    case = {**case_of(37, 5, 16, 6), "activations": activations}
    made = model_of(NAME, case, opset)
    onnx.checker.check_model(ir.to_proto(made), full_check=True)
    (function,) = made.functions.values()
    assert {node.domain for node in function.all_nodes()} == {""}
    assert function.opset_imports[""] == opset
    check(case, opset)


@EACH_MODE
def test_the_weight_is_folded(activations: str, tmp_path: Path) -> None:
    run_body(NAME, {**case_of(37, 5, 16, 6), "activations": activations}, optimized=f"{tmp_path}/optimized.onnx")
    left = [node.op_type for node in ir.load(tmp_path / "optimized.onnx").graph]
    assert left[-2:] == ["MatMul", "Cast"]  # of an output of the graph to its own type; elsewhere that goes, too
    if activations == "float32":
        assert len(left) == 2
    elif activations == "bfloat16":
        assert left[:-2] == ["Cast", "Cast"]
    assert not {"If", "Gather", "BitShift", "Equal"} & set(left)


def test_cost_and_registration() -> None:
    case = case_of(64, 40, 32, 6, leading=(2, 3))
    names = ("x", "codes", "scales", "table", "zero_points", "bias")
    cost = MATMUL_TABLE.cost([case[name].shape for name in names])
    assert cost.operations == 2 * 6 * 64 * 48
    assert cost.bytes == 3 * 4 * 32 * 6 + 4 * (6 * 64 + 6 * 48 + 3 * 2 * 16 + 64 + 1 + 1)
    assert OPERATORS[NAME] is MATMUL_TABLE
    assert model_of(NAME, {**case, "activations": "int8"}).opset_imports[DOMAIN] == MATMUL_TABLE.version == 1
