"""Body and kernel against the definition, the definition against frozen vectors, and refusals."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from graphopt.passes.phases import CANONICAL_OPSETS
from graphopt.runtime_ops.split_rotary.spec.op import SPLIT_ROTARY, reference
from tests.native import needs_library
from tests.runtime_ops.hostile import Case, Tensor
from tests.runtime_ops.split_rotary.honest import honest
from tests.runtime_ops.states import arrays, by_kernel, by_reference
from tests.runtime_ops.test_registry import run_body


def check(case: Case, outputs: list[np.ndarray]) -> None:
    """Two products and a sum in float32, rounded once more to the type of x; values are copied."""
    expected = by_reference(case)
    size = np.abs(arrays(case)[0].astype(np.float64)).max(initial=0)
    limit = 4 * np.finfo(np.float32).eps * size
    if expected[0].dtype == np.float16:
        limit += np.finfo(np.float16).eps * size
    for output, stated in zip(outputs, expected, strict=True):
        assert (output.shape, output.dtype) == (stated.shape, stated.dtype)
        assert (np.abs(output.astype(np.float64) - stated) <= limit).all()
    np.testing.assert_array_equal(outputs[2], expected[2])


def case_of(tokens: int = 3, **attributes: int) -> Case:
    random = np.random.default_rng(0)
    chosen = {"heads": 4, "kv_heads": 2, "rotary": 6, "rotary_interleaved": 0} | attributes
    angles = random.uniform(0, 6, (2, tokens, 3))
    inputs = {"x": random.standard_normal((2, tokens, 8 * 10)), "cos": np.cos(angles), "sin": np.sin(angles)}
    tensors = {name: Tensor(array.astype(np.float32), "fed") for name, array in inputs.items()}
    return Case("SplitRotary", tensors, chosen)


@given(honest())
@settings(max_examples=20, deadline=None)
def test_the_body_is_the_reference(case: Case) -> None:
    check(case, run_body(case))


@needs_library
@given(honest())
@settings(max_examples=40, deadline=None)
def test_the_kernel_is_the_reference(case: Case) -> None:
    check(case, by_kernel(case))


@needs_library
@pytest.mark.parametrize("interleaved", [0, 1])
def test_many_tokens_are_cut_into_tasks(interleaved: int) -> None:
    case = case_of(tokens=500, rotary_interleaved=interleaved)
    check(case, by_kernel(case))


@pytest.mark.parametrize("opset", CANONICAL_OPSETS)
def test_the_body_runs_in_every_opset_that_passes_take(opset: int) -> None:
    case = case_of()
    check(case, run_body(case, opset))


def test_a_turn_keeps_the_length_of_each_pair_and_leaves_the_others() -> None:
    case = case_of()
    x = arrays(case)[0].reshape(2, 3, 8, 10)
    queries = by_reference(case)[0].reshape(2, 3, 4, 10)
    lengths = np.hypot(x[..., :3], x[..., 3:6])[:, :, :4]
    # a length of about 1, of two rounded numbers
    np.testing.assert_allclose(np.hypot(queries[..., :3], queries[..., 3:6]), lengths, atol=1e-6)
    np.testing.assert_array_equal(queries[..., 6:], x[:, :, :4, 6:])


@needs_library
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "the last axis of x is 80, which is no multiple of 9 heads"),
        ({"rotary": 12}, "rotary is 12, and a head has 10 numbers"),
        ({"rotary": 3}, "rotary must be even"),
        ({"rotary": 8}, r"cos must be \[2, 3, 4\]"),
        ({"heads": 0}, "heads and kv_heads must be at least 1"),
        ({"rotary_interleaved": 2}, "rotary_interleaved must be 0 or 1"),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_why(change: dict[str, Any], message: str) -> None:
    case = case_of(**change)
    with pytest.raises(Exception, match=message):
        by_kernel(case)
    with pytest.raises(ValueError, match=r"must be"):
        reference(*arrays(case), **case.attributes)


def test_vectors_are_what_the_reference_computes() -> None:
    text = (files("graphopt.runtime_ops") / "split_rotary" / "vectors" / "version1.json").read_text(encoding="utf-8")
    for vector in json.loads(text):
        inputs = [np.array(vector[name], np.float32) for name in SPLIT_ROTARY.schema.input_names]
        for name, output in zip(
            SPLIT_ROTARY.schema.output_names, reference(*inputs, **vector["attributes"]), strict=True
        ):
            np.testing.assert_array_equal(output, np.array(vector[name], np.float32))


def test_cost() -> None:
    cost = SPLIT_ROTARY.cost([(2, 3, 80), (2, 3, 3), (2, 3, 3)])
    # x is read and written; cos and sin are read
    assert (cost.operations, cost.bytes) == (3 * 480, 8 * 480 + 4 * 36)
