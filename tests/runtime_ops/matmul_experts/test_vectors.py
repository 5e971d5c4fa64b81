"""What a file that is saved today must still mean: three experts whose numbers every rounding of activations keeps."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from graphopt.runtime_ops.matmul_experts.spec.op import reference
from graphopt.runtime_ops.matmul_table.spec.activations import ON_GPUS
from graphopt.runtime_ops.matmul_table.spec.packing import pack, tile
from tests.native import needs_library
from tests.runtime_ops.matmul_experts.test_op import run
from tests.runtime_ops.matmul_table.test_vectors import load
from tests.runtime_ops.products import Case

EXPERTS, ROWS, COLUMNS, GROUP = 3, 37, 20, 16


def inputs_of(frozen: dict[str, Any]) -> tuple[Case, np.ndarray]:
    """The inputs by their formulas, with the packed bytes from the file, and the codes that these should hold."""
    bits = frozen["bits"]
    e, k, n = np.arange(EXPERTS)[:, None, None], np.arange(ROWS)[None, :, None], np.arange(COLUMNS)[None, None]
    g = np.arange(-(-ROWS // GROUP))[None, :, None]
    packed = np.frombuffer(base64.b64decode(frozen["codes"]), np.uint8)
    x = (np.arange(4 * ROWS).reshape(4, ROWS) * 29 % 255 - 127).astype(np.float32)
    x[:, ::16] = 127  # the largest of each group of 16
    case = {
        "x": x,
        "codes": packed.reshape(EXPERTS, -(-COLUMNS // 16), -(-ROWS // 16), 32 * bits),
        "scales": np.stack([tile(one) for one in (2.0 ** ((n + g + e) % 3 - 1)).astype(np.float16)]),
        "table": (np.arange(2**bits) * 5 % 2**bits - 2 ** (bits - 1)).astype(np.float32),
        "zero_points": np.stack([tile(one) for one in ((n + 2 * g + e) % 4).astype(np.float16)]),
        "bias": (np.arange(EXPERTS)[:, None] * 100 + np.arange(COLUMNS)).astype(np.float32),
        "experts": np.array(frozen["experts"], np.int64),
        "rows": ROWS,
        "columns": COLUMNS,
        "group": GROUP,
    }
    return case, ((37 * k + 11 * n + 5 * k * n + 3 * e) % 2**bits).astype(np.uint8)


EACH = pytest.mark.parametrize("frozen", load("matmul_experts"), ids=lambda frozen: f"{frozen['bits']} bits")


@EACH
def test_reference_and_body(frozen: dict[str, Any]) -> None:
    case, codes = inputs_of(frozen)
    np.testing.assert_array_equal(np.stack([pack(one, frozen["bits"]) for one in codes]), case["codes"])
    for activations in ON_GPUS:  # uint4 does not keep integers beyond 15
        assert reference(**case, activations=activations).tolist() == frozen["y"]
    for activations in ("float32", "int8"):
        assert run({**case, "activations": activations}, library=False).tolist() == frozen["y"]


@needs_library
@EACH
def test_kernels(frozen: dict[str, Any]) -> None:
    case, _ = inputs_of(frozen)
    for activations in ("float32", "bfloat16", "int8", "int16"):
        assert run({**case, "activations": activations}, library=True).tolist() == frozen["y"]
