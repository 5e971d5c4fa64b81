"""KVAttention's CUDA kernels as onnxruntime sees them, on its CPU provider: the host interpreter runs them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings

from graphopt.runtime_ops.library import PATH_VARIABLE
from tests.runtime_ops.kv_attention.test_hostile import Case, check, fixed, hostile, run
from tests.runtime_ops.kv_attention.test_kernel import REFUSED, SOME, assert_refused, compare, inputs_of
from tests.runtime_ops.kv_cases import GPU_STORAGES, STATE, assert_float16_is_widened, attributes_of, tokens_of
from tests.runtime_ops.kv_native import NODE, Native


@pytest.fixture(autouse=True)
def on_device(interpreted: ctypes.CDLL, interpreted_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions take the interpreted library, which stays loaded between them: the interpreter keeps its stacks."""
    monkeypatch.setenv(PATH_VARIABLE, str(interpreted_library))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("storage", GPU_STORAGES)
def test_the_operator_is_the_reference(storage: str, in_place: bool) -> None:
    attributes = attributes_of(storage=storage, policies=[2, 1], **SOME)
    tokens = tokens_of(attributes, 36, batch=2, sink_logits=True, sink_query=True)
    compare(attributes, tokens, 4, (30, 1, 5), new=((30, 7), (1, 0), (5, 5)), run=Native(in_place=in_place))


@pytest.mark.parametrize(("others", "message"), REFUSED)
def test_inputs_that_do_not_fit_are_refused(others: dict[str, np.ndarray], message: str) -> None:
    assert_refused(others, message)


@pytest.mark.parametrize("name", STATE)
def test_a_state_that_is_no_multiple_of_16_bytes_is_refused(name: str) -> None:
    case = fixed(policies=[2], compensate=1)
    case.in_place, case.shift = True, {name: 8}
    says = run(case)
    assert isinstance(says, str)
    assert f"output {1 + STATE.index(name)} lies at no multiple of 16 bytes" in says


def test_more_heads_than_a_gpu_takes_are_refused() -> None:
    attributes = attributes_of(kv_heads=257)
    with pytest.raises(Exception, match=f"'{NODE}': KVAttention: kv_heads is 257, on a GPU it must be from 1 to 256"):
        Native()(*inputs_of(attributes).values(), **attributes.for_node())


def test_hostile_calls_are_errors_or_defined() -> None:
    @given(hostile())
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    def no_crash(case: Case) -> None:
        assume(not any(name in case.shift for name in STATE))  # the CPU takes codes at any address
        assume(case.attributes.get("storage", "float32") in GPU_STORAGES)
        assume("value_storage" not in case.attributes)
        assume(not case.attributes.get("key_feedback"))  # which these kernels refuse
        assume(cost_of(case) < 4e6)
        check(case)

    no_crash()


def cost_of(case: Case) -> float:
    """Return how many numbers of keys all queries of a call read, or less, so that interpreting takes no minutes."""
    query, keys = (case.inputs[name].shape for name in ("query", "keys"))
    return float(np.prod(query, dtype=np.float64) * (keys[2] * 16 if len(keys) == 4 else 1))


def test_queries_of_float16() -> None:
    assert_float16_is_widened(Native(), Native(activations=np.float16), storage="int8", policies=(1, 2), budget=1)
