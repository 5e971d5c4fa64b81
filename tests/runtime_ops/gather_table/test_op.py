from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from graphopt.passes.phases import CANONICAL_OPSETS
from graphopt.runtime_ops.dequantize.spec.op import reference as dequantized
from graphopt.runtime_ops.dequantize_trellis.spec.op import values_of
from graphopt.runtime_ops.gather_table.spec.op import GATHER_TABLE, reference
from graphopt.runtime_ops.matmul_table.spec.levels import numbers_of
from graphopt.runtime_ops.matmul_table.spec.packing import bits_of, pack, tile, unpack, untile
from tests.native import needs_library
from tests.runtime_ops.bodies import run_body
from tests.runtime_ops.gather_table.honest import honest
from tests.runtime_ops.hostile import NODE, Case, Tensor, run

NAMES = ("ids", "codes", "scales", "table", "zero_points")


def case_of(ids: Any, *, rows: int = 20, columns: int = 19, bits: int = 3, entries: int = 8) -> Case:
    """Return columns of random codes, without zero points."""
    random = np.random.default_rng(0)
    inputs = {
        "ids": Tensor(np.array(ids, np.int64), "fed"),
        "codes": Tensor(pack(random.integers(0, entries, (rows, columns)).astype(np.uint8), bits)),
        "scales": Tensor(tile(random.uniform(0.1, 1, (-(-rows // 16), columns)).astype(np.float16))),
        "table": Tensor(random.standard_normal(entries).astype(np.float32)),
        "zero_points": Tensor(np.zeros((1, 1, 1), np.float16)),
    }
    return Case("GatherTable", inputs, {"rows": rows, "columns": columns, "group": 16})


def arrays(case: Case) -> list[np.ndarray]:
    return [case.inputs[name].values for name in NAMES]


def by_body(case: Case, opset: int = 23) -> np.ndarray:
    return run_body("GatherTable", arrays(case), case.attributes, opset, case.inputs["ids"].values.ndim + 1)


def by_kernel(case: Case, folder: Path) -> np.ndarray:
    return run(*case.model(folder))


@given(honest())
@settings(max_examples=25, deadline=None)
def test_the_body_is_the_reference_to_the_last_bit(case: Case) -> None:
    # the same two operations of float32
    np.testing.assert_array_equal(by_body(case), reference(*arrays(case), **case.attributes))


@needs_library
@given(honest())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_kernel_is_the_reference_to_the_last_bit(tmp_path: Path, case: Case) -> None:
    for name in NAMES[1:]:
        case.inputs[name].where = "graph"  # whatever its size, its data are aligned
    np.testing.assert_array_equal(by_kernel(case, tmp_path), reference(*arrays(case), **case.attributes))


@given(honest())
@settings(max_examples=25, deadline=None)
def test_a_column_is_that_of_the_logical_matrix_to_the_last_bit(case: Case) -> None:
    ids, codes, scales, table, points = arrays(case)
    sizes = case.attributes
    levels = (sizes["rows"], sizes["group"], sizes.get("span", 0), sizes.get("low", 0))
    scales, points = (numbers_of(part, *levels) for part in (scales, points))
    full = untile(np.broadcast_to(points, scales.shape), sizes["columns"])
    indices, factors = unpack(codes, sizes["rows"], sizes["columns"]), untile(scales, sizes["columns"])
    if sizes.get("trellis", 0):
        of_row = np.arange(sizes["rows"]) // sizes["group"]
        values = values_of(indices, table, bits_of(codes.shape))
        matrix = (values - full[of_row].astype(np.float32)) * factors[of_row].astype(np.float32)
    else:
        matrix = dequantized(indices, factors, table, full, sizes["group"], sizes.get("minimums", 0))
    np.testing.assert_array_equal(reference(*arrays(case), **sizes), matrix.T[ids])


@needs_library
def test_many_columns_are_cut_into_tasks(tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(-300, 300, (7, 1000))
    case = case_of(ids, rows=130, columns=300, bits=6, entries=64)
    np.testing.assert_array_equal(by_kernel(case, tmp_path), reference(*arrays(case), **case.attributes))


@pytest.mark.parametrize("opset", CANONICAL_OPSETS)
def test_the_body_runs_in_every_opset_that_passes_take(opset: int) -> None:
    case = case_of([[0, 18, -1], [-19, 16, 3]])
    np.testing.assert_array_equal(by_body(case, opset), reference(*arrays(case), **case.attributes))


# 19 columns are padded to 32 in the tiles: the padding is no column
@pytest.mark.parametrize("odd", [19, 31, 32, -20, 2**62, -(2**63)])
def test_ids_out_of_range_are_errors_of_reference_and_body(odd: int) -> None:
    case = case_of([0, odd])
    with pytest.raises(IndexError):
        reference(*arrays(case), **case.attributes)
    with pytest.raises(Exception, match="Gather"):
        by_body(case)


@needs_library
@pytest.mark.parametrize("odd", [19, 31, 32, -20, 2**62, -(2**63)])
def test_the_kernel_names_an_id_out_of_range(odd: int, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=rf"node '{NODE}': ids must be from -19 to 18, one is {odd}"):
        by_kernel(case_of([0, odd]), tmp_path)


def test_a_code_without_an_entry_is_an_error() -> None:
    case = case_of([1])
    case.inputs["table"].values = case.inputs["table"].values[:2]
    with pytest.raises(IndexError):
        reference(*arrays(case), **case.attributes)
    with pytest.raises(Exception, match="Gather"):
        by_body(case)


@needs_library
def test_the_kernel_names_a_code_without_an_entry(tmp_path: Path) -> None:
    case = case_of([1])
    case.inputs["table"].values = case.inputs["table"].values[:2]
    with pytest.raises(Exception, match=rf"node '{NODE}': a code is \d, in a table of 2 numbers"):
        by_kernel(case, tmp_path)


def test_groups_that_do_not_fit_the_scales_are_an_error() -> None:
    case = case_of([1])
    with pytest.raises(ValueError, match="20 rows in groups of 32 have 1 scales, not 2"):
        reference(*arrays(case), **{**case.attributes, "group": 32})


def test_frozen_vectors_keep_their_meaning() -> None:
    """Never regenerate the file: a change that it does not survive is a new version of the operator."""
    folder = files("graphopt.runtime_ops").joinpath("gather_table", "vectors", "version1.json")
    for frozen in json.loads(folder.read_text()):
        types = (np.int64, np.uint8, np.float16, np.float32, np.float16)
        inputs = {name: np.array(frozen[name], dtype) for name, dtype in zip(NAMES, types, strict=True)}
        case = Case("GatherTable", {name: Tensor(array) for name, array in inputs.items()}, frozen["attributes"])
        assert reference(*inputs.values(), **frozen["attributes"]).tolist() == frozen["y"]
        assert by_body(case).tolist() == frozen["y"]


def test_cost() -> None:
    cost = GATHER_TABLE.cost([(2, 5), (4, 3, 96), (4, 2, 16), (8,), (1, 1, 1)])
    # 10 columns of 48 rows: an id, codes of 3 bits, 2 scales and zero points, and the floats that come out
    assert (cost.operations, cost.bytes) == (3 * 10 * 48, 10 * (8 + 18 + 16 + 4 * 48) + 4 * 8)
