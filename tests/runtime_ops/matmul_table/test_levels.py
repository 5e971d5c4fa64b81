"""Scales in two levels: packed and unpacked, and read by bodies and by kernels to the bits of the numbers they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.ort.session import open_session
from graphopt.runtime_ops.gather_table.spec.op import reference as look_up
from graphopt.runtime_ops.matmul_table.spec.levels import bytes_of_tile, numbers_of, pack_levels, unpack_levels
from graphopt.runtime_ops.matmul_table.spec.op import reference
from graphopt.runtime_ops.matmul_table.spec.packing import pack
from tests.native import needs_library
from tests.pairwise import pairwise
from tests.runtime_ops import bodies, hostile
from tests.runtime_ops.hostile import Tensor
from tests.runtime_ops.products import Case, model_of, run_body

TILE = 16
# As K-quants have them: 4 bits for 16 groups (Q2_K), 6 with a sign (Q3_K) and without (Q4_K), 8 with a sign (Q6_K).
KINDS = ((4, 0, 16), (6, -32, 16), (6, 0, 8), (8, -128, 16))


def levels_of(shape: tuple[int, int], kind: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return packed numbers, [tiles, bytes], and these numbers, [tiles, groups, 16]."""
    (tiles, groups), (bits, low, span) = shape, kind
    random = np.random.default_rng(bits + groups)
    levels = random.integers(low, low + 2**bits, (tiles, groups, TILE))
    steps = random.uniform(-6e-8, 1, (tiles, -(-groups // span), TILE)).astype(np.float16)  # the smallest is subnormal
    steps[0, 0, :2] = 2**-24, -(2**-15)
    wide = np.repeat(steps.astype(np.float32), span, axis=1)[:, :groups]
    return pack_levels(levels, steps, bits, low), levels.astype(np.float32) * wide


def cases_of(kind: tuple[int, int, int], rows: int, columns: int, group: int, *, minimums: bool) -> tuple[Case, Case]:
    """Return the same product with scales in two levels, and with numbers."""
    shape, (_, low, span) = (-(-columns // TILE), -(-rows // group)), kind
    packed, numbers = levels_of(shape, kind)
    random = np.random.default_rng(0)
    common = {
        "x": random.standard_normal((3, rows)).astype(np.float32),
        "codes": pack(random.integers(0, 16, (rows, columns)).astype(np.uint8), 4),
        "table": np.linspace(-1, 1, 16, dtype=np.float32),
        "bias": np.zeros(1, np.float32),
        "rows": rows,
        "columns": columns,
        "group": group,
        "minimums": int(minimums),
        "activations": "float32",
    }
    zeros = (packed[::-1].copy(), numbers[::-1].copy()) if minimums else (np.zeros((1, 1)), np.zeros((1, 1, 1)))
    of_levels = {"scales": packed, "zero_points": zeros[0].astype(np.uint8), "span": span, "low": low}
    return common | of_levels, common | {"scales": numbers, "zero_points": zeros[1].astype(np.float32)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [8, 40, 64])
def test_levels_come_back(kind: tuple[int, int, int], groups: int) -> None:
    bits, low, span = kind
    packed, numbers = levels_of((3, groups), kind)
    assert packed.shape == (3, bytes_of_tile(groups, bits, span))
    assert unpack_levels(packed, groups, span, low).tobytes() == numbers.tobytes()
    of_experts = unpack_levels(np.stack([packed, packed]), groups, span, low)
    assert of_experts.shape == (2, *numbers.shape)
    with pytest.raises(ValueError, match=f"{groups + 64} groups in two levels"):
        unpack_levels(packed, groups + 64, span, low)


def test_numbers_stay_and_placeholders_are_zeros() -> None:
    numbers = np.ones((2, 3, TILE), np.float16)
    assert numbers_of(numbers, 48, 16, 0, 0) is numbers
    assert not numbers_of(np.zeros((1, 1), np.uint8), 48, 16, 8, 0).any()


@pytest.mark.parametrize(("kind", "minimums"), pairwise(KINDS, [False, True]))
def test_a_body_reads_levels(kind: tuple[int, int, int], *, minimums: bool) -> None:
    of_levels, of_numbers = cases_of(kind, 256, 20, 16, minimums=minimums)
    np.testing.assert_array_equal(reference(**of_levels), reference(**of_numbers))
    np.testing.assert_array_equal(run_body("MatMulTable", of_levels), run_body("MatMulTable", of_numbers))


@needs_library
@pytest.mark.parametrize(
    ("kind", "minimums", "activations", "rows_of_x"),
    pairwise(KINDS, [False, True], ["float32", "bfloat16", "int8", "uint4"], [1, 3, 40]),
)
def test_kernels_read_levels(
    kind: tuple[int, int, int],
    activations: str,
    rows_of_x: int,
    instructions: str,
    tmp_path: Path,
    *,
    minimums: bool,
) -> None:
    """The same bits as from floats: a product of 8 and 11 bits is one number of float32."""
    results = []
    for case in cases_of(kind, 528 if kind[2] == 16 else 384, 40, 16, minimums=minimums):
        case["x"] = np.resize(case["x"], (rows_of_x, case["rows"]))
        model = model_of("MatMulTable", case | {"activations": activations}, has_body=False)
        ir.save(model, tmp_path / "model.onnx")
        results.append(open_session(tmp_path / "model.onnx").run(None, {"x": case["x"]})[0])
    np.testing.assert_array_equal(*results)
    assert instructions


@needs_library
@pytest.mark.parametrize(("kind", "minimums"), pairwise(KINDS, [False, True]))
def test_lookups_read_levels(kind: tuple[int, int, int], tmp_path: Path, *, minimums: bool) -> None:
    names = ("codes", "scales", "table", "zero_points")
    attributes = ("rows", "columns", "group", "minimums", "span", "low")
    ids = np.array([0, 19, -20, 7])
    of_levels, of_numbers = cases_of(kind, 256, 20, 16, minimums=minimums)
    inputs = [ids, *(of_levels[name] for name in names)]
    flags = {name: of_levels[name] for name in attributes}
    expected = look_up(
        ids, *(of_numbers[name] for name in names), **{name: of_numbers[name] for name in attributes[:4]}
    )
    np.testing.assert_array_equal(look_up(*inputs, **flags), expected)
    np.testing.assert_array_equal(bodies.run_body("GatherTable", inputs, flags), expected)
    tensors = {name: Tensor(of_levels[name]) for name in names}
    case = hostile.Case("GatherTable", {"ids": Tensor(ids, "fed"), **tensors}, flags)
    np.testing.assert_array_equal(hostile.run(*case.model(tmp_path)), expected)
