"""What a file that is saved today must still mean: packed bytes and products, frozen in ``vectors/`` beside each op.

All numbers are integers or halves that every way of rounding activations keeps, so the products are exact. Never
regenerate these files: a change that they do not survive is a new version of the operator.
"""

from __future__ import annotations

import base64
import json
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

from graphopt.runtime_ops.matmul_dynamic.spec.op import reference as dynamic_reference
from graphopt.runtime_ops.matmul_table.spec.activations import ON_GPUS
from graphopt.runtime_ops.matmul_table.spec.op import reference
from graphopt.runtime_ops.matmul_table.spec.packing import pack, tile, unpack
from tests.runtime_ops.products import Case, run_body


def load(op: str, file: str = "version1.json") -> list[dict[str, Any]]:
    return json.loads(files("graphopt.runtime_ops").joinpath(op, "vectors", file).read_text())


def trellis_of(frozen: dict[str, Any]) -> Case:
    """The weight of a frozen trellis, times a unit matrix: its numbers have few bits, so y is the weight."""
    types = {"codes": np.uint8, "scales": np.float16, "tables": np.float32}
    codes, scales, table = (np.array(frozen[name], dtype) for name, dtype in types.items())
    sizes = {name: frozen[name] for name in ("rows", "columns", "group")}
    absent = {"zero_points": np.zeros((1, 1, 1), np.float16), "bias": np.zeros(1, np.float32)}
    x = np.eye(sizes["rows"], dtype=np.float32)
    return {"x": x, "codes": codes, "scales": scales, "table": table, **absent, **sizes, "trellis": 1}


def inputs_of(frozen: dict[str, Any]) -> tuple[Case, np.ndarray]:
    """The inputs by their formulas, with the packed bytes from the file, and the codes that these should hold."""
    rows, columns, group, bits = (frozen[key] for key in ("rows", "columns", "group", "bits"))
    k, n = np.arange(rows)[:, None], np.arange(columns)[None]
    g = np.arange(-(-rows // group))[:, None]
    packed = np.frombuffer(base64.b64decode(frozen["codes"]), np.uint8)
    x = (np.arange(3 * rows).reshape(3, rows) * 29 % 255 - 127).astype(np.float32)
    x[:, ::16] = 127  # the largest of each group of 16
    case = {
        "x": x,
        "codes": packed.reshape(-(-columns // 16), -(-rows // 16), 32 * bits),
        "scales": tile((2.0 ** ((n + g) % 3 - 1)).astype(np.float16)),
        "table": (np.arange(2**bits) * 5 % 2**bits - 2 ** (bits - 1)).astype(np.float32),
        "zero_points": tile(((n + 2 * g) % 4).astype(np.float16)),
        "bias": np.arange(columns).astype(np.float32),
        "rows": rows,
        "columns": columns,
        "group": group,
    }
    return case, ((37 * k + 11 * n + 5 * k * n) % 2**bits).astype(np.uint8)


@pytest.mark.parametrize("frozen", load("matmul_table"), ids=lambda frozen: f"{frozen['bits']} bits")
def test_matmul_table(frozen: dict[str, Any]) -> None:
    case, codes = inputs_of(frozen)
    assert np.array_equal(pack(codes, frozen["bits"]), case["codes"])
    assert np.array_equal(unpack(case["codes"], case["rows"], case["columns"]), codes)
    for activations in ON_GPUS:  # uint4 does not keep integers beyond 15
        assert reference(**case, activations=activations).tolist() == frozen["y"]
    assert run_body("MatMulTable", {**case, "activations": "float32"}).tolist() == frozen["y"]
    assert run_body("MatMulTable", {**case, "activations": "int8"}).tolist() == frozen["y"]


@pytest.mark.parametrize("frozen", load("matmul_table", "trellis1.json"), ids=lambda frozen: str(frozen["rows"]))
def test_trellises(frozen: dict[str, Any]) -> None:
    case = {**trellis_of(frozen), "activations": "float32"}
    assert reference(**case).tolist() == frozen["W"]
    assert run_body("MatMulTable", case).tolist() == frozen["W"]


@pytest.mark.parametrize("frozen", load("matmul_dynamic"), ids=lambda frozen: f"{frozen['activation_bits']} bits")
def test_matmul_dynamic(frozen: dict[str, Any]) -> None:
    case, _ = inputs_of(frozen)
    # x = h Q^T, with an h of integers and a Q that is made of halves
    left, right = (np.array(frozen[side], np.int8) for side in ("left", "right"))
    Q = np.kron(np.eye(case["rows"] // 4), np.kron(left, right)) / 2
    levels = 2 ** (frozen["activation_bits"] - 1) - 1
    h = np.clip(case["x"], -levels, levels) * [[1], [2], [4]]
    case |= {"x": (h @ Q.T).astype(np.float32), "left": left, "right": right, "bits": frozen["activation_bits"]}
    assert dynamic_reference(**case, clip=1.0).tolist() == frozen["y"]
    assert run_body("MatMulDynamic", {**case, "clip": 1.0}).tolist() == frozen["y"]
