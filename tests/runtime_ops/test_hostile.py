"""Hostile model files: an error that names the node, or a result that the operator defines, and never a crash.

A case starts honest and is then spoiled: shapes that lie, codes beyond the table, sizes that overflow, data that ends
early. `make test-native` runs many more of them, against a library that stops at the first invalid access. Single
faults are in ``test_hostile_faults.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import graphopt.runtime_ops
from graphopt.runtime_ops.instructions import ISA_VARIABLE
from tests.native import INSTRUCTIONS, needs_library, skip_without
from tests.runtime_ops.cases import FOLDERS, HERE, honest
from tests.runtime_ops.hostile import (
    FLOATS,
    INTEGERS,
    TYPES,
    Case,
    Tensor,
    check,
    examples,
    other_attribute,
    other_shape,
)

pytestmark = needs_library

EXAMPLES = examples(40)
OPERATORS = Path(graphopt.runtime_ops.__file__).parent
# Operators with a kernel. One whose nodes have several outputs has a test of its own, beside its other tests.
HONEST: dict[str, Callable[[], st.SearchStrategy[Case]]] = {
    folder: honest(folder)
    for folder in FOLDERS
    if (OPERATORS / folder / "cpu").is_dir() and not (HERE / folder / "test_hostile.py").is_file()
}


# What a stranger may do to them. Each of these changes the case in place.


def _any_input(draw: st.DrawFn, case: Case) -> Tensor:
    return case.inputs[draw(st.sampled_from(sorted(case.inputs)))]


def _stored_input(draw: st.DrawFn, case: Case) -> Tensor:
    """Return one that the file holds."""
    tensor = _any_input(draw, case)
    if tensor.where not in ("graph", "file"):
        tensor.where = draw(st.sampled_from(["graph", "file"]))
    return tensor


def another_shape(draw: st.DrawFn, case: Case) -> None:
    tensor = _any_input(draw, case)
    shape = other_shape(draw, list(tensor.values.shape))
    tensor.values = np.resize(tensor.values, shape).astype(tensor.values.dtype)


def a_shape_that_lies(draw: st.DrawFn, case: Case) -> None:
    tensor = _stored_input(draw, case)
    shape = list(tensor.values.shape) or [1]
    shape[draw(st.integers(0, len(shape) - 1))] = draw(st.sampled_from([*INTEGERS, 2, 3]))
    tensor.says = shape


def data_that_ends_early(draw: st.DrawFn, case: Case) -> None:
    tensor = _stored_input(draw, case)
    tensor.cut = draw(st.integers(1, max(1, tensor.values.nbytes)))


def external_data_that_lies_anywhere(draw: st.DrawFn, case: Case) -> None:
    for tensor in case.inputs.values():
        if tensor.where == "graph":
            tensor.where, tensor.shift = "file", draw(st.integers(0, 65))


def external_data_beyond_the_file(draw: st.DrawFn, case: Case) -> None:
    tensor = _any_input(draw, case)
    tensor.where = "file"
    if draw(st.booleans()):
        tensor.offset = draw(st.sampled_from([*INTEGERS, 3, 4095, 4096, 4097]))
    else:
        tensor.length = draw(st.sampled_from([*INTEGERS, 3]))


def another_type(draw: st.DrawFn, case: Case) -> None:
    tensor = _any_input(draw, case)
    with np.errstate(invalid="ignore", over="ignore"):
        tensor.values = tensor.values.astype(draw(st.sampled_from(TYPES)))


def another_place(draw: st.DrawFn, case: Case) -> None:
    _any_input(draw, case).where = draw(st.sampled_from(["graph", "file", "fed", "nowhere"]))


def fewer_or_more_inputs(draw: st.DrawFn, case: Case) -> None:
    if draw(st.booleans()):
        case.inputs.popitem()
    else:
        case.inputs["one more"] = Tensor(np.zeros((1, 1), np.float32))


def other_values(draw: st.DrawFn, case: Case) -> None:
    tensor = _any_input(draw, case)
    flat = tensor.values = tensor.values.copy()
    if flat.size:
        at = draw(st.integers(0, flat.size - 1))
        value = draw(st.sampled_from(FLOATS)) if flat.dtype.kind == "f" else draw(st.integers(0, 255))
        with np.errstate(over="ignore"):
            flat.reshape(-1)[at] = np.array(value).astype(flat.dtype)


def a_short_table(draw: st.DrawFn, case: Case) -> None:
    if "table" in case.inputs:
        table = case.inputs["table"]
        table.values = table.values.reshape(-1)[: draw(st.integers(0, 256))]


def matrices_of_any_signs(draw: st.DrawFn, case: Case) -> None:
    for name in ("left", "right"):
        if name in case.inputs:
            order = draw(st.integers(0, 24))
            random = np.random.default_rng(order)
            case.inputs[name].values = random.choice(np.array([1, -1], np.int8), (order, order))


def other_attributes(draw: st.DrawFn, case: Case) -> None:
    odd = ["", "int", "int8 ", "int88", "float64", "x" * 16, "x" * 100_000, b"int8\0x", b"\xff\xfe", "%s%n%s"]
    other_attribute(draw, case.attributes, [*INTEGERS, 48, 112], odd)


def sizes_that_agree_on_a_lie(draw: st.DrawFn, case: Case) -> None:
    """Attributes so large that products of them are small again in 64 bits."""
    if "rows" in case.attributes:
        case.attributes["rows"] = draw(st.sampled_from(INTEGERS))
        case.attributes["columns"] = draw(st.sampled_from(INTEGERS))
        case.attributes["group"] = draw(st.sampled_from([*INTEGERS, case.attributes["rows"]]))


def another_version(draw: st.DrawFn, case: Case) -> None:
    case.version = draw(st.sampled_from([0, 2, 1000, 2**31 - 1]))


SPOIL = [
    another_shape,
    another_shape,
    a_shape_that_lies,
    data_that_ends_early,
    external_data_that_lies_anywhere,
    external_data_beyond_the_file,
    another_type,
    another_place,
    fewer_or_more_inputs,
    other_values,
    other_values,
    a_short_table,
    matrices_of_any_signs,
    other_attributes,
    other_attributes,
    sizes_that_agree_on_a_lie,
    another_version,
]


@st.composite
def hostile(draw: st.DrawFn, honest: Callable[[], st.SearchStrategy[Case]]) -> Case:
    case = draw(honest())
    for spoil in draw(st.lists(st.sampled_from(SPOIL), max_size=3)):
        if case.inputs:
            spoil(draw, case)
    return case


@pytest.mark.parametrize("isa", INSTRUCTIONS)
@pytest.mark.parametrize("operator", sorted(HONEST))
def test_an_error_that_names_the_node_or_a_result_that_is_defined(
    operator: str, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without(isa)
    monkeypatch.setenv(ISA_VARIABLE, isa)
    found: Counter[bool] = Counter()

    @given(hostile(HONEST[operator]))
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    def no_crash(case: Case) -> None:
        found[check(case, tmp_path) is None] += 1

    no_crash()
    assert min(found[False], found[True]) > 0, "results and errors were to be tried both"
