"""Body and kernel against the definition, the definition against frozen vectors, and what it says of padding."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from graphopt.passes.phases import CANONICAL_OPSETS
from graphopt.runtime_ops.instructions import ISA_VARIABLE
from graphopt.runtime_ops.linear_recurrence.spec.op import LINEAR_RECURRENCE, reference
from tests.native import INSTRUCTIONS, needs_library, skip_without
from tests.runtime_ops.hostile import Case, Tensor
from tests.runtime_ops.linear_recurrence.honest import honest
from tests.runtime_ops.states import arrays, by_kernel, by_reference
from tests.runtime_ops.test_registry import run_body

NAMES = LINEAR_RECURRENCE.schema.input_names


def check(case: Case, outputs: list[np.ndarray]) -> None:
    """Compare with the reference, by a bound on what float32 does.

    Keys have length 1, decays and betas are at most 1, so no step makes the state longer by more than a value: each
    adds an error of a few units in the last place, of sums of K + 4 numbers as large as the state.
    """
    expected, state = by_reference(case)
    values = {name: tensor.values.astype(np.float64) for name, tensor in case.inputs.items()}
    channels, tokens = values["state"].shape[2], values["value"].shape[1]
    length = np.linalg.norm(values["state"], axis=2).max(initial=0) + np.abs(values["value"]).max(initial=0) * tokens
    eps = np.finfo(np.float32).eps
    limit = 2 * eps * (channels + 8) ** 0.5 * (tokens + 2) * length
    reach = np.linalg.norm(values["query"], axis=3).max(initial=0) * abs(case.attributes["scale"])
    narrow = np.finfo(np.float16).eps * np.abs(expected.astype(np.float64)) if expected.dtype == np.float16 else 0
    assert [output.shape for output in outputs] == [expected.shape, state.shape]
    assert [output.dtype for output in outputs] == [expected.dtype, state.dtype]
    assert (np.abs(outputs[0].astype(np.float64) - expected) <= 2 * limit * reach + narrow).all()
    assert (np.abs(outputs[1].astype(np.float64) - state) <= limit).all()


@given(honest())
@settings(max_examples=30, deadline=None)
def test_the_body_is_the_reference(case: Case) -> None:
    check(case, run_body(case))


@needs_library
@pytest.mark.parametrize("isa", INSTRUCTIONS)
def test_the_kernel_is_the_reference(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without(isa)
    monkeypatch.setenv(ISA_VARIABLE, isa)

    @given(honest(lengths=(0, 1, 1, 2, 3, 5, 9, 40, 70)))
    @settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
    def agree(case: Case) -> None:
        check(case, by_kernel(case))

    agree()


def case_of(
    tokens: int = 7, *, decays: int = 1, beta: int = 1, masked: bool = False, delta: int = 1, width: int = 20
) -> Case:
    random, (heads, key_heads, channels) = np.random.default_rng(0), (4, 2, 18)
    key = random.standard_normal((2, tokens, key_heads, channels))
    inputs = {
        "query": random.standard_normal(key.shape),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": random.standard_normal((2, tokens, heads, width)),
        "decay": -random.uniform(0, 1, (2, tokens, heads, decays)),
        "beta": random.uniform(0, 1, (2, tokens, heads, beta)),
        "state": random.standard_normal((2, heads, channels, width)),
    }
    fed: dict[str, np.ndarray] = {name: array.astype(np.float32) for name, array in inputs.items()}
    fed["mask"] = random.integers(0, 2, (2, tokens if masked else 0))
    return Case("LinearRecurrence", {name: Tensor(fed[name], "fed") for name in NAMES}, {"delta": delta, "scale": 0.5})


def tokens_of(case: Case, which: Any, rows: slice = slice(None)) -> list[np.ndarray]:
    """Return the inputs of some tokens of some rows, none of them padding."""
    *of_tokens, _, state = arrays(case)
    some = [tensor[rows][:, which] for tensor in of_tokens]
    return [*some, np.zeros((len(some[0]), 0), np.int64), state[rows]]


@pytest.mark.parametrize("delta", [0, 1])
def test_a_call_is_the_same_as_two_calls(delta: int) -> None:
    case = case_of(delta=delta)
    whole, last = reference(*arrays(case), **case.attributes)
    first, between = reference(*tokens_of(case, slice(3)), **case.attributes)
    second, end = reference(*tokens_of(case, slice(3, None))[:-1], between, **case.attributes)
    # the state is rounded to float32 in between
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, atol=1e-6)
    np.testing.assert_allclose(end, last, atol=1e-6)


@pytest.mark.parametrize("by", [run_body, pytest.param(by_kernel, marks=needs_library)])
@pytest.mark.parametrize("tokens", [1, 7, 150])
def test_padding_is_as_if_it_were_not_there_whatever_it_holds(by: Any, tokens: int) -> None:
    case = case_of(tokens, masked=True)
    mask = case.inputs["mask"].values
    for name in ("query", "key", "value", "decay", "beta"):
        tensor = case.inputs[name]
        tensor.values = np.where(mask[..., None, None] != 0, tensor.values, np.nan).astype(np.float32)
    output, new_state = by(case)
    for row in range(2):
        is_read = mask[row] != 0
        alone, after = reference(*tokens_of(case, is_read, slice(row, row + 1)), **case.attributes)
        np.testing.assert_allclose(output[row, is_read], alone[0], atol=1e-5)  # sums of 18 numbers of size 1 to 10
        np.testing.assert_array_equal(output[row, ~is_read], 0)
        np.testing.assert_allclose(new_state[row], after[0], atol=1e-5)


@needs_library
@pytest.mark.parametrize("isa", INSTRUCTIONS)
@pytest.mark.parametrize("per_key", [2, 3, 6])  # 6 are more than go together, so a task has the heads of two keys
def test_heads_that_share_a_key_give_the_bits_that_they_give_with_keys_of_their_own(
    per_key: int, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without(isa)  # a machine runs what it has
    monkeypatch.setenv(ISA_VARIABLE, isa)
    random, (tokens, key_heads, channels, width) = np.random.default_rng(0), (37, 2, 18, 20)
    heads = key_heads * per_key
    for decays in (1, channels):
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("query", "key"), (1, tokens, key_heads, channels))
        shapes |= {"value": (1, tokens, heads, width), "decay": (1, tokens, heads, decays)}
        shapes |= {"beta": (1, tokens, heads, 1), "state": (1, heads, channels, width)}
        fed: dict[str, np.ndarray] = {
            name: random.uniform(-1, 0, shape).astype(np.float32) for name, shape in shapes.items()
        }
        fed["key"] /= np.linalg.norm(fed["key"], axis=-1, keepdims=True)
        fed["mask"] = random.integers(0, 3, (1, tokens))
        apart = fed | {name: np.repeat(fed[name], per_key, axis=2) for name in ("query", "key")}
        shared, own = (
            by_kernel(
                Case(
                    "LinearRecurrence",
                    {name: Tensor(inputs[name], "fed") for name in NAMES},
                    {"delta": 1, "scale": 0.5},
                )
            )
            for inputs in (fed, apart)
        )
        for one, other in zip(shared, own, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_decay_of_minus_infinity_forgets() -> None:
    for decays in (1, 18):
        case = case_of(70, decays=decays)
        case.inputs["decay"].values[:, [0, 3, 40]] = -np.inf
        for by in (run_body, by_kernel):
            check(case, by(case))


def test_large_decays_in_a_long_call_lose_nothing_and_overflow_nowhere() -> None:
    for decays in (1, 18):
        case = case_of(200, decays=decays)
        decay = case.inputs["decay"].values
        decay[:, ::2] *= 80  # e^(-40) each: sums of them are far beyond what exponentials of float32 hold
        decay[:, 1::2] *= 1e-3
        check(case, by_kernel(case))


@pytest.mark.parametrize("opset", CANONICAL_OPSETS)
@pytest.mark.parametrize("delta", [0, 1])
def test_the_body_runs_in_every_opset_that_passes_take(opset: int, delta: int) -> None:
    case = case_of(masked=True, delta=delta)
    check(case, run_body(case, opset))


@needs_library
def test_tasks_change_no_bit() -> None:
    for tokens in (1, 6, 100):
        case = case_of(tokens)
        for one, two in zip(by_kernel(case, threads=1), by_kernel(case, threads=2), strict=True):
            np.testing.assert_array_equal(one, two)


SHAPES = {
    "query": ((2, 7, 2, 0), "query must"),
    "key": ((2, 7, 2, 17), "key must"),
    "value": ((2, 7, 3, 20), "3 heads of values do not share 2 heads of keys"),
    "decay": ((2, 7, 4, 2), "decay"),
    "beta": ((2, 7, 4, 2), "beta"),
    "mask": ((2, 6), "mask"),
    "state": ((2, 4, 20, 18), "state must"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_do_not_fit_are_errors_of_reference_and_kernel(name: str) -> None:
    case, (shape, message) = case_of(), SHAPES[name]
    case.inputs[name].values = np.zeros(shape, case.inputs[name].values.dtype)
    with pytest.raises(ValueError, match=message):
        by_reference(case)
    with pytest.raises(Exception, match=f"node 'node': {message}"):
        by_kernel(case)


def test_an_unknown_rule_is_an_error() -> None:
    case = case_of(delta=2)
    with pytest.raises(ValueError, match="delta must be 0 or 1, and is 2"):
        by_reference(case)
    with pytest.raises(Exception, match="LinearRecurrence: delta must be 0 or 1"):
        run_body(case)
    with pytest.raises(Exception, match="node 'node': delta must be 0 or 1, and is 2"):
        by_kernel(case)


def test_frozen_vectors_keep_their_meaning() -> None:
    """Never regenerate the file: a change that it does not survive is a new version of the operator."""
    file = files("graphopt.runtime_ops").joinpath("linear_recurrence", "vectors", "version1.json")
    for frozen in json.loads(file.read_text()):
        types = {"mask": np.int64}
        inputs = {
            name: np.array(frozen[name], types.get(name, np.float32)).reshape(frozen["shapes"][name]) for name in NAMES
        }
        fed = {name: Tensor(array, "fed") for name, array in inputs.items()}
        case = Case("LinearRecurrence", fed, frozen["attributes"])
        output, new_state = by_reference(case)
        # a last bit of an exponential may differ between versions of NumPy
        np.testing.assert_allclose(output, frozen["output"], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(new_state, frozen["new_state"], rtol=1e-6, atol=1e-6)
        check(case, run_body(case))


def test_cost() -> None:
    shapes = [(2, 5, 2, 8), (2, 5, 2, 8), (2, 5, 4, 6), (2, 5, 4, 1), (2, 5, 4, 0), (2, 5), (2, 4, 8, 6)]
    cost = LINEAR_RECURRENCE.cost(shapes)
    # 40 tokens of a head: each of 48 numbers is decayed, and read twice and written by a product and a sum
    numbers = 2 * 160 + 2 * 240 + 40 + 2 * 384
    assert (cost.operations, cost.bytes) == (7 * 40 * 48, 4 * numbers + 8 * 10)
