"""Body against the definition, the definition against frozen vectors, and codes against the bytes that they lie in."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphopt.passes.phases import CANONICAL_OPSETS
from graphopt.runtime_ops.dequantize_codebook.spec.op import DEQUANTIZE_CODEBOOK, reference
from graphopt.runtime_ops.dequantize_codebook.spec.packing import join_bits, slice_bits, to_blocks, to_matrix
from tests.runtime_ops.dequantize_codebook.honest import honest
from tests.runtime_ops.hostile import Case, Tensor
from tests.runtime_ops.test_registry import run_body

TYPES = {"codes": np.uint8, "levels": np.uint8}


def load(folder: str) -> list[dict[str, Any]]:
    """Return the frozen cases of an operator, lists as arrays."""
    text = files("graphopt.runtime_ops").joinpath(folder, "vectors", "version1.json").read_text()
    cases: list[dict[str, Any]] = json.loads(text)
    return cases


def case_of(frozen: dict[str, Any], operator: str) -> Case:
    arrays = {name: np.array(values, TYPES.get(name, np.float32)) for name, values in frozen["inputs"].items()}
    return Case(operator, {name: Tensor(array, "fed") for name, array in arrays.items()}, frozen["attributes"])


def check(case: Case, outputs: list[np.ndarray]) -> None:
    expected = reference(*(tensor.values for tensor in case.inputs.values()), **case.attributes)
    # the same operations on float32 in the same order
    np.testing.assert_array_equal(outputs[0], expected)


@given(honest())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_body_is_the_reference(case: Case) -> None:
    check(case, run_body(case))


@given(st.integers(1, 32), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_bits_are_put_together_again(bits: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (count, 16), np.uint32, endpoint=False)
    words = slice_bits(codes, bits)
    assert words.shape == (count, 2 * bits)
    np.testing.assert_array_equal(join_bits(words), codes)
    # bit i of word b is bit b of code i, and the lower byte of a word comes first
    if count:
        word = int(words[0, 2 * (bits - 1)]) | int(words[0, 2 * bits - 1]) << 8
        assert [word >> i & 1 for i in range(16)] == [int(code) >> (bits - 1) & 1 for code in codes[0]]


@given(st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 1), st.integers(1, 40), st.integers(1, 40))
def test_entries_lie_along_their_axis(size: int, axis: int, rows: int, columns: int) -> None:
    matrix = np.arange(rows * columns).reshape(rows, columns)
    padded = np.pad(matrix, ((0, -rows % size if axis == 0 else 0), (0, -columns % size if axis else 0)))
    entries = padded.reshape(-1, size, columns).swapaxes(1, 2) if axis == 0 else padded.reshape(rows, -1, size)
    codes = np.arange(entries.shape[0] * entries.shape[1], dtype=np.uint32).reshape(entries.shape[:2])
    blocks = join_bits(to_blocks(codes, size, axis, 16))
    values = entries.reshape(-1, size)[np.minimum(blocks, codes.size - 1)]
    np.testing.assert_array_equal(to_matrix(values, axis, rows, columns), matrix)


def test_a_code_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="code 8 does not fit 3 bits"):
        slice_bits(np.full(16, 8, np.uint32), 3)


@pytest.mark.parametrize("opset", CANONICAL_OPSETS)
def test_the_body_runs_in_every_opset_that_passes_take(opset: int) -> None:
    case = case_of(load("dequantize_codebook")[0], "DequantizeCodebook")
    check(case, run_body(case, opset))


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("sign_bits", 3, "with 3 signs"),
        ("axis", 2, "cannot be"),
        ("index_bits", 0, "cannot be"),
        ("group", 12, "no multiples of 8"),
        ("columns", 40, "codes must be"),
        ("rows", 100, "codes must be"),
    ],
)
def test_attributes_that_do_not_fit_are_refused(attribute: str, value: int, message: str) -> None:
    case = case_of(load("dequantize_codebook")[0], "DequantizeCodebook")
    case.attributes[attribute] = value
    with pytest.raises(ValueError, match=message):
        reference(*(tensor.values for tensor in case.inputs.values()), **case.attributes)


def test_frozen_vectors_keep_their_meaning() -> None:
    """Never regenerate the file: a change that it does not survive is a new version of the operator."""
    for frozen in load("dequantize_codebook"):
        case = case_of(frozen, "DequantizeCodebook")
        arrays = [tensor.values for tensor in case.inputs.values()]
        np.testing.assert_array_equal(reference(*arrays, **case.attributes), np.array(frozen["W"], np.float32))
        check(case, run_body(case))


def test_cost() -> None:
    # 2 tiles of 3 blocks of 16 entries of 8 numbers, 16 bits each; scales, levels, three tables
    shapes = [(2, 3, 32), (2, 1, 16), (2, 1, 8), (2, 16), (256, 8), (1,)]
    cost = DEQUANTIZE_CODEBOOK.cost(shapes)
    numbers = 2 * 3 * 16 * 8
    assert cost.operations == 5 * numbers
    assert cost.bytes == 192 + 16 + 4 * (32 + 32 + 2048 + 1) + 4 * numbers
