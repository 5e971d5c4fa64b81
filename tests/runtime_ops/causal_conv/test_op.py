"""Body and kernel against the definition, the definition against frozen vectors, and what it says of padding."""

from __future__ import annotations

import json
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from graphopt.passes.phases import CANONICAL_OPSETS
from graphopt.runtime_ops.causal_conv.spec.op import CAUSAL_CONV, reference
from graphopt.runtime_ops.instructions import ISA_VARIABLE
from tests.native import INSTRUCTIONS, needs_library, skip_without
from tests.runtime_ops.causal_conv.honest import honest
from tests.runtime_ops.hostile import Case, Tensor
from tests.runtime_ops.states import arrays, by_kernel, by_reference
from tests.runtime_ops.test_registry import run_body


def check(case: Case, outputs: list[np.ndarray]) -> None:
    """Sums of at most 8 products in float32, rounded once more to the type of x; states are copied."""
    y, new_state = by_reference(case)
    x, weight, bias, _, state = (np.abs(array.astype(np.float64)) for array in arrays(case))
    size = weight.sum(1) * max(x.max(initial=0), state.max(initial=0)) + (bias if bias.size else 0)
    # the exponential of silu has a relative error of 2e-7
    limit = 16 * np.finfo(np.float32).eps * size + (np.finfo(y.dtype).eps * size if y.dtype == np.float16 else 0)
    assert outputs[0].shape == y.shape
    assert outputs[0].dtype == y.dtype
    assert (np.abs(outputs[0].astype(np.float64) - y) <= limit).all()
    np.testing.assert_array_equal(outputs[1], new_state)


@given(honest())
@settings(max_examples=20, deadline=None)
def test_the_body_is_the_reference(case: Case) -> None:
    check(case, run_body(case))


@needs_library
@pytest.mark.parametrize("isa", INSTRUCTIONS)
def test_the_kernel_is_the_reference(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without(isa)
    monkeypatch.setenv(ISA_VARIABLE, isa)

    @given(honest())
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    def agree(case: Case) -> None:
        check(case, by_kernel(case))

    agree()


def case_of(tokens: int = 11, channels: int = 20, taps: int = 4, *, masked: bool = False) -> Case:
    random = np.random.default_rng(0)
    shapes = {
        "x": (2, tokens, channels),
        "weight": (channels, taps),
        "bias": (channels,),
        "state": (2, channels, taps - 1),
    }
    inputs = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    mask = random.integers(0, 2, (2, tokens if masked else 0))
    ordered = {name: inputs.get(name, mask) for name in CAUSAL_CONV.schema.input_names}
    return Case("CausalConv", {name: Tensor(array, "fed") for name, array in ordered.items()}, {"activation": "silu"})


def test_a_call_is_the_same_as_two_calls() -> None:
    x, weight, bias, mask, state = arrays(case_of())
    whole, last = reference(x, weight, bias, mask, state, "silu")
    first, between = reference(x[:, :2], weight, bias, mask, state, "silu")
    second, end = reference(x[:, 2:], weight, bias, mask, between, "silu")
    np.testing.assert_array_equal(np.concatenate([first, second], 1), whole)
    np.testing.assert_array_equal(end, last)


@pytest.mark.parametrize("by", [run_body, pytest.param(by_kernel, marks=needs_library)])
def test_padding_is_as_if_it_were_not_there_whatever_it_holds(by: object) -> None:
    case = case_of(masked=True)
    x, weight, bias, mask, state = arrays(case)
    case.inputs["x"].values = x = np.where(mask[..., None] != 0, x, np.nan).astype(np.float32)
    y, new_state = by(case)  # type: ignore[operator]
    for row in range(len(x)):
        is_read = mask[row] != 0
        alone, after = reference(
            x[row : row + 1, is_read], weight, bias, np.zeros((1, 0), np.int64), state[row : row + 1], "silu"
        )
        # as in `check`: sums of 5 numbers of size 10
        np.testing.assert_allclose(y[row, is_read], alone[0], atol=1e-5)
        np.testing.assert_array_equal(y[row, ~is_read], 0)
        np.testing.assert_array_equal(new_state[row], after[0])


@pytest.mark.parametrize("opset", CANONICAL_OPSETS)
def test_the_body_runs_in_every_opset_that_passes_take(opset: int) -> None:
    case = case_of(masked=True)
    check(case, run_body(case, opset))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("weight", (19, 4), r"weight must be \[20, L\]"),
        ("weight", (20, 0), r"weight must be \[20, L\]"),
        ("bias", (19,), r"bias must be \[20\] or \[0\]"),
        ("mask", (2, 10), r"mask must be \[2, 11\] or \[2, 0\]"),
        ("mask", (1, 0), r"mask must be \[2, 11\] or \[2, 0\]"),
        ("state", (2, 20, 4), r"state must be \[2, 20, 3\]"),
    ],
)
def test_shapes_that_do_not_fit_are_errors_of_reference_and_kernel(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    case = case_of()
    case.inputs[name].values = np.zeros(shape, case.inputs[name].values.dtype)
    with pytest.raises(ValueError, match=message):
        by_reference(case)
    with pytest.raises(Exception, match=f"node 'node': {message}"):
        by_kernel(case)


@pytest.mark.parametrize("activation", ["relu", "", "silu\0x"])
def test_an_unknown_activation_is_an_error(activation: str) -> None:
    case = case_of()
    case.attributes["activation"] = activation
    with pytest.raises(ValueError, match="activation must be one of none, silu"):
        by_reference(case)
    with pytest.raises(Exception, match="Gather"):
        run_body(case)
    with pytest.raises(Exception, match="node 'node': .*activation must be"):
        by_kernel(case)


def test_frozen_vectors_keep_their_meaning() -> None:
    """Never regenerate the file: a change that it does not survive is a new version of the operator."""
    file = files("graphopt.runtime_ops").joinpath("causal_conv", "vectors", "version1.json")
    for frozen in json.loads(file.read_text()):
        types = {"mask": np.int64}
        inputs = {
            name: np.array(frozen[name], types.get(name, np.float32)).reshape(frozen["shapes"][name])
            for name in CAUSAL_CONV.schema.input_names
        }
        case = Case("CausalConv", {name: Tensor(array, "fed") for name, array in inputs.items()}, frozen["attributes"])
        y, new_state = by_reference(case)
        # a last bit of an exponential may differ between versions of NumPy
        np.testing.assert_allclose(y, frozen["y"], rtol=1e-6, atol=1e-6)
        assert new_state.tolist() == frozen["new_state"]
        check(case, run_body(case))


def test_cost() -> None:
    cost = CAUSAL_CONV.cost([(2, 5, 8), (8, 4), (8,), (2, 5), (2, 8, 3)])
    # each of 80 numbers has 4 taps; x and y, the state before and after, taps, bias, and 10 numbers of the mask
    assert (cost.operations, cost.bytes) == (2 * 80 * 4, 4 * (2 * 80 + 2 * 48 + 32 + 8) + 8 * 10)
