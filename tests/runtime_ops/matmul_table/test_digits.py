"""Codes that are digits of base 3, five in a byte: bodies and kernels read them to the bits of codes of 2 bits."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.ort.session import open_session
from graphopt.runtime_ops.gather_table.spec.op import reference as look_up
from graphopt.runtime_ops.matmul_table.spec.op import reference
from graphopt.runtime_ops.matmul_table.spec.packing import bits_of, pack, pack_digits, unpack, unpack_digits
from tests.native import needs_library
from tests.runtime_ops import bodies, hostile
from tests.runtime_ops.hostile import Tensor
from tests.runtime_ops.matmul_table.test_vectors import load
from tests.runtime_ops.products import Case, case_of, model_of, run_body


def cases_of(rows: int, columns: int, group: int, **options: Any) -> tuple[Case, Case]:
    """Return the same product with digits, and with codes of 2 bits."""
    case = {**case_of(rows, columns, group, 2, entries=3, **options), "activations": "float32"}
    return {**case, "codes": pack_digits(case["codes"]), "base": 3}, case


@given(st.integers(0, 2**32 - 1), st.integers(1, 70), st.integers(1, 40))
def test_codes_come_back(seed: int, rows: int, columns: int) -> None:
    random = np.random.default_rng(seed)
    codes = random.integers(0, 3, (rows, columns)).astype(np.uint8)
    planes = pack(codes, 2)
    digits = pack_digits(planes)
    assert digits.shape == (*planes.shape[:2], 52)
    assert bits_of(digits.shape) == 2
    assert np.array_equal(unpack_digits(digits), planes)
    assert np.array_equal(unpack(digits, rows, columns), codes)
    # any byte is five digits: no file has a code of 3
    strange = unpack(random.integers(0, 256, digits.shape).astype(np.uint8), rows, columns)
    assert strange.max() <= 2


def test_a_code_of_3_is_no_digit() -> None:
    codes = np.zeros((16, 16), np.uint8)
    codes[3, 5] = 3
    with pytest.raises(ValueError, match="a code is 3"):
        pack_digits(pack(codes, 2))


@pytest.mark.parametrize("frozen", load("matmul_table", "digits1.json"), ids=lambda frozen: str(frozen["rows"]))
def test_digits_mean_what_they_meant(frozen: dict[str, Any]) -> None:
    rows, columns = frozen["rows"], frozen["columns"]
    tiles, units = -(-columns // 16), -(-rows // 16)
    case = {
        "x": np.eye(rows, dtype=np.float32),
        "codes": np.frombuffer(base64.b64decode(frozen["codes"]), np.uint8).reshape(tiles, units, 52),
        "scales": np.ones((tiles, 1, 16), np.float32),
        "table": np.array(frozen["table"], np.float32),
        "zero_points": np.zeros((1, 1, 1), np.float32),
        "bias": np.zeros(1, np.float32),
        **{name: frozen[name] for name in ("rows", "columns", "group")},
        "activations": "float32",
        "base": 3,
    }
    assert reference(**case).tolist() == frozen["W"]
    assert run_body("MatMulTable", case).tolist() == frozen["W"]


@pytest.mark.parametrize("options", [{}, {"minimums": True}, {"zero_points": True}])
def test_a_body_reads_digits(options: dict[str, bool]) -> None:
    of_digits, of_bits = cases_of(100, 20, 16, **options)
    np.testing.assert_array_equal(reference(**of_digits), reference(**of_bits))
    np.testing.assert_array_equal(run_body("MatMulTable", of_digits), run_body("MatMulTable", of_bits))


@needs_library
@pytest.mark.parametrize("activations", ["float32", "int8"])
@pytest.mark.parametrize("rows_of_x", [1, 40])
def test_kernels_read_digits(activations: str, rows_of_x: int, instructions: str, tmp_path: Path) -> None:
    """The same bits as from codes, in the first call, which takes them apart, and in the next."""
    results = []
    for case in cases_of(288, 136, 32):
        case["x"] = np.resize(case["x"], (rows_of_x, case["rows"]))
        ir.save(model_of("MatMulTable", case | {"activations": activations}, has_body=False), tmp_path / "model.onnx")
        session = open_session(tmp_path / "model.onnx")
        results += [session.run(None, {"x": case["x"]})[0] for _ in range(2)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    assert instructions


@needs_library
def test_codes_of_several_tasks_are_taken_apart(tmp_path: Path) -> None:
    """A little more than 1 MiB of codes of 2 bits is two tasks, of which the last is shorter."""
    results = []
    for case in cases_of(1024, 4200, 1024, leading=(1,)):
        ir.save(model_of("MatMulTable", case, has_body=False), tmp_path / "model.onnx")
        results.append(open_session(tmp_path / "model.onnx", threads=2).run(None, {"x": case["x"]})[0])
    np.testing.assert_array_equal(*results)


@needs_library
def test_lookups_read_digits(tmp_path: Path) -> None:
    names, sizes = ("codes", "scales", "table", "zero_points"), ("rows", "columns", "group")
    ids = np.array([0, 19, -20, 7])
    of_digits, of_bits = cases_of(100, 20, 16, zero_points=True)
    expected = look_up(ids, *(of_bits[name] for name in names), **{name: of_bits[name] for name in sizes})
    inputs, flags = [ids, *(of_digits[name] for name in names)], {name: of_digits[name] for name in (*sizes, "base")}
    np.testing.assert_array_equal(look_up(*inputs, **flags), expected)
    np.testing.assert_array_equal(bodies.run_body("GatherTable", inputs, flags), expected)
    tensors = {name: Tensor(of_digits[name]) for name in names}
    case = hostile.Case("GatherTable", {"ids": Tensor(ids, "fed"), **tensors}, flags)
    np.testing.assert_array_equal(hostile.run(*case.model(tmp_path)), expected)


@needs_library
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": 2}, "base must be 0, or 3"),
        ({"trellis": 1}, "base must be 0, or 3 for codes that are no trellis"),
        ({"codes": np.zeros((2, 7, 64), np.uint8)}, r"codes must have the shape \[2, 7, 52\]"),
        ({"base": 0}, r"codes must have the shape \[2, 7, 32 \* bits\]"),
        ({"table": np.zeros(2, np.float32)}, "table must have 3 numbers at least for codes in base 3"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    of_digits, _ = cases_of(100, 20, 16)
    flags = {name: of_digits[name] for name in ("rows", "columns", "group", "activations", "base")}
    names = ("x", "codes", "scales", "table", "zero_points", "bias")
    tensors = {name: Tensor({**of_digits, **change}[name], "fed" if name == "x" else "graph") for name in names}
    flags |= {name: value for name, value in change.items() if name not in tensors}
    case = hostile.Case("MatMulTable", tensors, flags)
    with pytest.raises(Exception, match=message):
        hostile.run(*case.model(tmp_path))


def test_a_reference_wants_digits_where_the_attribute_says_so() -> None:
    of_digits, of_bits = cases_of(100, 20, 16)
    for case in (of_digits | {"base": 0}, of_bits | {"base": 3}):
        with pytest.raises(ValueError, match="do not fit base"):
            reference(**case)
