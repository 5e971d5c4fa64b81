"""Nodes of strangers: an error that names the node, or what the operator defines, and never a crash."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphopt.runtime_ops.paged_attention.spec.op import reference
from tests.native import needs_library
from tests.runtime_ops.hostile import INTEGERS, Case, examples, other_attribute, other_shape
from tests.runtime_ops.paged_attention.honest import honest
from tests.runtime_ops.paged_attention.test_kernel import by_kernel
from tests.runtime_ops.paged_attention.test_op import arrays

pytestmark = needs_library


@st.composite
def hostile(draw: st.DrawFn) -> Case:
    case = draw(honest(storages=("float32", "int4"), fed=(np.float32,)))
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(case.inputs)))
        tensor = case.inputs[name]
        match draw(st.sampled_from(["number", "number", "number", "shape", "attribute"])):
            case "number" if tensor.values.size and tensor.values.dtype == np.int32:
                tensor.values = tensor.values.copy()
                number = draw(st.sampled_from([0, 1, -1, 2, 7, 40, 2**31 - 1, -(2**31)]))
                tensor.values.reshape(-1)[draw(st.integers(0, tensor.values.size - 1))] = number
            case "shape":
                shape = other_shape(draw, list(tensor.values.shape))
                tensor.values = np.resize(tensor.values, shape).astype(tensor.values.dtype)
            case "attribute":
                other_attribute(draw, case.attributes, INTEGERS, ["", "int8"])
    return case


def test_hostile_nodes_are_errors_that_name_the_node_or_have_a_result() -> None:
    found: Counter[bool] = Counter()

    @given(hostile())
    @settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
    def no_crash(case: Case) -> None:
        says = ""
        try:
            y, *_ = by_kernel(case)
        except Exception as error:
            says = str(error)
        if says:
            found[False] += 1
            assert "ai.graphopt node 'node'" in says or "ai.graphopt node" not in says
            return
        found[True] += 1
        expected, *_ = reference(*arrays(case), **case.attributes)
        numbers = [value for value in case.attributes.values() if not isinstance(value, str)]
        # larger scales and slopes, and NaN, leave scores that float32 and float64 do not share
        if all((np.abs(value) < 1e3).all() for value in map(np.asarray, numbers)):
            np.testing.assert_allclose(y, expected, atol=1e-3)

    no_crash()
    assert min(found[False], found[True]) > 0, "results and errors were to be tried both"


@st.composite
def lying(draw: st.DrawFn) -> Case:
    case = draw(honest(storages=("float32", "int4"), fed=(np.float32,)))
    for _ in range(draw(st.integers(1, 3))):
        numbers = case.inputs[draw(st.sampled_from(["starts", "past", "block_table"]))]
        numbers.values = numbers.values.copy()
        place = draw(st.integers(0, numbers.values.size - 1))
        near = int(numbers.values.reshape(-1)[place]) + draw(st.integers(-3, 3))
        odd = draw(st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31), max(-(2**31), min(near, 2**31 - 1))]))
        numbers.values.reshape(-1)[place] = odd
    return case


def test_numbers_that_lie_are_errors_that_name_the_node_where_the_definition_has_errors() -> None:
    found: Counter[bool] = Counter()

    @given(lying())
    @settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
    def same(case: Case) -> None:
        try:
            expected, *_ = reference(*arrays(case), **case.attributes)
        except ValueError:
            found[False] += 1
            with pytest.raises(Exception, match="ai.graphopt node 'node': "):
                by_kernel(case)
            return
        found[True] += 1
        np.testing.assert_allclose(by_kernel(case)[0], expected, atol=1e-3)

    same()
    assert min(found[False], found[True]) > 0, "results and errors were to be tried both"
