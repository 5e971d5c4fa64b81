"""Hostile calls of KVAttention: an error that names the node and changes nothing, or what the operator defines.

A call starts honest and is then spoiled: lengths, attributes, shapes and types that lie, numbers of any bits, memory at
any address. `make test-native` runs many more of them, against a library that stops at the first invalid access.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from graphopt.ort.session import array_of, ort_value
from graphopt.runtime_ops import DOMAIN, library_path
from graphopt.runtime_ops.kv_attention.spec.attributes import LEVELS, PAGES, STORAGES, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.policies.retrieval import SUMMARIES
from graphopt.runtime_ops.kv_attention.spec.reference import reference
from tests.native import needs_library
from tests.runtime_ops.hostile import FLOATS, INTEGERS, TYPES, attribute, examples, other_attribute, other_shape
from tests.runtime_ops.kv_attention.bound import bound
from tests.runtime_ops.kv_cases import (
    INPUTS,
    STATE,
    Arrays,
    Bounded,
    Fed,
    assert_same_state,
    attributes_of,
    feedback_of,
    tokens_of,
    unit_of,
)
from tests.runtime_ops.kv_native import NODE, Native

pytestmark = needs_library

EXAMPLES = examples(40)

MOST_PAGES = 2**31
"""Of `sink_pages` and `recent_pages` in the kernel."""

NUMBERS = np.array([*FLOATS, 1e-38, -1e-40, 1e19, -1e30, 65504, 65520, 6e-8, 0, 0, 0], np.float32)
# NaNs may have any payload, and may be signaling
NUMBERS[-3:] = np.array([0x7F800001, 0xFFC12345, 0x7FFFFFFF], np.uint32).view(np.float32)
NEWER = {"mass", "channels", "compensate"}
"""Attributes that a node need not have."""

_ATTRIBUTE_TYPES = {"scale": float, "softcap": float, "mass": float, "storage": str, "summary": str, "policies": list}
_ATTRIBUTE_TYPES |= {"value_storage": str}


@dataclass
class Case:
    """A call, and where its tensors lie."""

    attributes: dict[str, Any]
    inputs: Arrays
    threads: int = 1
    in_place: bool = False
    shift: dict[str, int] = field(default_factory=dict)  # bytes from an address that fits
    written: dict[str, str] = field(default_factory=dict)  # output of a state: the input in whose memory it is written
    says: dict[str, list[int]] = field(default_factory=dict)  # shapes that numpy has no array of


def types_of(case: Case) -> dict[str, int]:
    """Return the ONNX types of the inputs: onnxruntime does not know all of NumPy's."""
    return {name: helper.np_dtype_to_tensor_dtype(tensor.dtype) for name, tensor in case.inputs.items()}


def session_of(case: Case) -> onnxruntime.InferenceSession:
    """Return a session that knows no shapes, so that the kernel sees all of them."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = case.threads
    # each tensor in memory of its own, so that the sanitizer sees where it ends
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.register_custom_ops_library(str(library_path()))
    types = types_of(case)
    inputs = [helper.make_tensor_value_info(name, types[name], None) for name in case.inputs]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    outputs += [helper.make_tensor_value_info(f"{name}_after", types[name], None) for name in STATE]
    names = ["y", *(f"{name}_after" for name in STATE)]
    node = helper.make_node("KVAttention", list(case.inputs), names, name=NODE, domain=DOMAIN)
    node.attribute.extend(attribute(name, value) for name, value in case.attributes.items())
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(helper.make_graph([node], "one", inputs, outputs), opset_imports=opsets, ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def placed(tensor: np.ndarray, shift: int) -> np.ndarray:
    """Return a copy that ends where its memory ends, ``shift`` bytes behind an address that fits."""
    memory = np.empty(tensor.nbytes + shift, np.uint8)[shift:]
    copy = memory.view(tensor.dtype).reshape(tensor.shape) if tensor.size else np.empty_like(tensor)
    copy[...] = tensor
    return copy


def run(case: Case) -> list[onnxruntime.OrtValue] | str:
    """Return the outputs, or what the error says; an error must leave all memory as it was, a result all inputs."""
    memory = {name: placed(tensor, case.shift.get(name, 0)) for name, tensor in case.inputs.items()}
    before = {name: tensor.tobytes() for name, tensor in memory.items()}
    types, error = types_of(case), ""
    results: list[onnxruntime.OrtValue] = []
    try:
        session = session_of(case)
        binding = session.io_binding()
        for name, tensor in memory.items():
            shape = case.says.get(name, list(tensor.shape))
            binding.bind_input(name, "cpu", 0, types[name], shape, tensor.ctypes.data)
        written = {**({name: name for name in STATE} if case.in_place else {}), **case.written}
        binding.bind_output("y")
        for name in STATE:
            if name in written:
                shape, tensor = case.says.get(name, list(memory[name].shape)), memory[written[name]]
                binding.bind_output(f"{name}_after", "cpu", 0, types[name], shape, tensor.ctypes.data)
            else:
                binding.bind_output(f"{name}_after")
        session.run_with_iobinding(binding)
        results = binding.get_outputs()
        if not case.says:  # onnxruntime's views end with the binding
            results = [ort_value(array_of(each)) for each in results]
    except Exception as raised:
        error = str(raised)
    assert not error or "[ONNXRuntimeError]" in error or error.startswith("Error in execution"), error
    # onnxruntime refuses some by itself, before it calls a kernel, with its own message
    assert f"ai.graphopt node '{NODE}'" in error or "ai.graphopt node" not in error
    for name, tensor in memory.items():
        assert (not error and case.in_place and name in STATE) or tensor.tobytes() == before[name], name
    return error or results


def expected_of(case: Case) -> tuple[np.ndarray, ...] | None:
    """Return what the reference does, or None where the call must be an error."""
    for name, value in case.attributes.items():
        if type(value) is not _ATTRIBUTE_TYPES.get(name, int):
            return None
    stated = set(case.attributes) - {"chunks", "value_storage", "key_feedback"}  # which a node may leave out
    names = [*INPUTS, *STATE, *(["feedback"] if case.attributes.get("key_feedback") else [])]
    if stated | NEWER != set(attributes_of().for_node()) or list(case.inputs) != names:
        return None
    if max(case.attributes["sink_pages"], case.attributes["recent_pages"]) > MOST_PAGES:
        return None
    if not all(isinstance(policy, int) for policy in case.attributes["policies"]):
        return None
    misplaced = [name for name, shift in case.shift.items() if shift % case.inputs[name].itemsize]
    if any(case.inputs[name].size for name in misplaced) or any(a != b for a, b in case.written.items()):
        return None
    try:
        with np.errstate(all="ignore"):
            return reference(*case.inputs.values(), **case.attributes)
    except ValueError:
        return None


def check(case: Case) -> bool:
    """Return whether there was a result, which is what it must be; or it was refused, as it must be."""
    expected, found = expected_of(case), run(case)
    if expected is None:
        assert isinstance(found, str), "it is to be refused"
        return False
    assert not isinstance(found, str), found
    outputs = [array_of(each) for each in found]
    for name, output, like in zip(("y", *STATE), outputs, (case.inputs["query"], *expected[1:]), strict=True):
        assert (output.shape, output.dtype) == (like.shape, like.dtype), name
    for name, output, wanted in zip(STATE, outputs[1:], expected[1:], strict=True):
        if name == "summaries" and (case.attributes["summary"] == "mean" or case.attributes.get("compensate")):
            continue  # a running sum, which other tests bound
        assert np.array_equal(output, wanted, equal_nan=wanted.dtype.kind in "fV"), name
    if 2 in case.attributes["policies"] and not (all(map(is_usual, case.inputs.values())) and are_bounds(case)):
        return True  # scores that overflow, NaN, or without bounds: which pages are chosen is undefined
    y = outputs[0]
    with np.errstate(all="ignore"):
        most = bound(*case.inputs.values(), **case.attributes)
        assert not np.isfinite(y[~np.isfinite(expected[0])]).any(), "what is read is not finite, y must tell"
        bounded = np.isfinite(most)
        error, limit = np.abs(y - expected[0])[bounded], most[bounded]
        assert (error <= limit).all(), (error[error > limit], limit[error > limit])
    return True


def is_usual(tensor: np.ndarray) -> bool:
    if tensor.dtype.kind not in "fV":
        return True
    with np.errstate(all="ignore"):
        sizes = np.abs(tensor[tensor != 0].astype(np.float64))
        return bool(((sizes > 1e-6) & (sizes < 1e6)).all())


def are_bounds(case: Case) -> bool:
    """Return whether the summaries are what calls leave behind: no minimum above its maximum."""
    size = case.inputs["key"].shape[2] // case.attributes["kv_heads"]
    low, high = (case.inputs["summaries"][..., begin : begin + size] for begin in (0, size))
    return case.attributes["summary"] == "mean" or bool((low <= high).all())


# Honest calls. A state may hold any numbers, so none needs to be fed.


@st.composite
def honest(draw: st.DrawFn) -> Case:
    storage = draw(st.sampled_from(STORAGES))
    page, heads = draw(st.sampled_from([16, 16, *PAGES])), draw(st.integers(1, 3))
    size = draw(st.sampled_from([16, 16, 32, 48, 256]))
    of_values = draw(st.sampled_from([storage, *LEVELS])) if storage in LEVELS else ""
    unit = max(map(unit_of, filter(None, (storage, of_values))))
    page, size = (-(-count // unit) * unit for count in (page, size))
    policies = draw(st.one_of(st.just([1]), st.just([0]), st.lists(st.integers(0, 2), min_size=heads, max_size=heads)))
    compensate = draw(st.integers(0, 1))
    window = 0 if compensate else draw(st.sampled_from([0, 0, 1, 17, 40]))
    attributes = KVAttributes(
        kv_heads=heads,
        scale=draw(st.sampled_from([0.25, 1.0])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
        window=window,
        chunks=draw(st.integers(0, 1)) if window else 0,
        page=page,
        storage=storage,
        value_storage=of_values,
        sink_pages=draw(st.integers(0, 2)),
        recent_pages=draw(st.integers(0, 2)),
        policies=tuple(policies),
        sinks=draw(st.sampled_from([0, 1, 5, 16, 20])),
        recent=draw(st.sampled_from([1, 7, 16, 40])),
        budget=draw(st.integers(0, 3)),
        summary=draw(st.sampled_from(SUMMARIES)),
        mass=draw(st.sampled_from([0.0, 0.0, 0.7, 1.0])),
        channels=draw(st.sampled_from([0, 0, 3, 40])),
        compensate=compensate,
        key_feedback=draw(st.integers(0, 1)) if storage in LEVELS else 0,
    )
    batch, columns, pages = draw(st.integers(0, 3)), draw(st.sampled_from([0, 1, 1, 2, 20])), draw(st.integers(0, 8))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens = tokens_of(
        attributes,
        columns,
        batch=batch,
        group=draw(st.sampled_from([1, 2, 3, 33])),
        head_size=size,
        sink_logits=draw(st.booleans()),
        sink_query=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )
    new = np.array([draw(st.integers(0, columns)) for _ in range(batch)], np.int64)
    capacity = pages * page
    wraps = attributes.may_wrap(pages, columns)
    far = [2**31 - 5, 2**31, 2**33 + 7, 2**53 + 1, 2**62 - 20] if wraps else []
    past = [draw(st.one_of(st.integers(0, max(0, capacity - columns)), *map(st.just, far))) for _ in range(batch)]
    state = {}
    for name, tensor in attributes.state(batch, pages, size):
        like = tensor.zeros()
        numbers = random.integers(0, 256, like.shape) if like.dtype == np.uint8 else random.standard_normal(like.shape)
        state[name] = numbers.astype(like.dtype)
    if attributes.retrieves and attributes.summary == "bounds":
        bounds = state["summaries"][..., : 2 * size]
        bounds[...] = np.sort(bounds.reshape(batch, heads, pages, 2, size), axis=3).reshape(bounds.shape)
    arrays = {**tokens, **state, "past": np.array(past, np.int64), "new": new}
    inputs = {name: arrays[name] for name in (*INPUTS, *STATE)}
    inputs |= feedback_of(attributes, size)
    return Case(attributes.for_node(), inputs, draw(st.integers(1, 2)), draw(st.booleans()))


# What a stranger may do to them. Each of these changes the case in place.


def lengths_that_lie(draw: st.DrawFn, case: Case) -> None:
    lengths = case.inputs[draw(st.sampled_from(["past", "new"]))] = np.array(
        case.inputs[draw(st.sampled_from(["past", "new"]))], np.int64
    )
    if lengths.size:
        pages = case.inputs["keys"].shape[2] if case.inputs["keys"].ndim == 4 else 0
        near = [pages * 16, pages * 16 + 1, pages * 128, 19, 21, 2**62 - 1, 2**62 + 1]
        lengths.reshape(-1)[draw(st.integers(0, lengths.size - 1))] = draw(st.sampled_from([*INTEGERS, *near]))


def other_attributes(draw: st.DrawFn, case: Case) -> None:
    odd = ["", "int", "int8 ", "float64", "x" * 16, "x" * 100_000, "int8\0x", "%s%n%s", *STORAGES, *SUMMARIES]
    other_attribute(draw, case.attributes, [*INTEGERS, 2, 3, 48, 64, 2**20, 2**20 + 1], odd)


def another_shape(draw: st.DrawFn, case: Case) -> None:
    name = draw(st.sampled_from(list(case.inputs)))
    shape = other_shape(draw, list(case.inputs[name].shape))
    case.inputs[name] = np.resize(case.inputs[name], shape).astype(case.inputs[name].dtype)


def states_of_other_pages(draw: st.DrawFn, case: Case) -> None:
    pages = draw(st.integers(0, 3))
    for name in STATE:
        tensor = case.inputs[name]
        if tensor.ndim == 4 and draw(st.booleans()):
            shape = (*tensor.shape[:2], pages, tensor.shape[3])
            case.inputs[name] = np.resize(tensor, shape).astype(tensor.dtype)


def unused_states_of_no_shape(draw: st.DrawFn, case: Case) -> None:
    for name in ("scales", "recent", "summaries"):
        if not case.inputs[name].size:
            case.inputs[name] = np.zeros(draw(st.permutations([0, 0, 3, 2**20])), np.float32)


def another_type(draw: st.DrawFn, case: Case) -> None:
    name = draw(st.sampled_from(list(case.inputs)))
    with np.errstate(invalid="ignore", over="ignore"):
        case.inputs[name] = case.inputs[name].astype(draw(st.sampled_from(TYPES)))


def memory_at_any_address(draw: st.DrawFn, case: Case) -> None:
    case.shift[draw(st.sampled_from(list(case.inputs)))] = draw(st.integers(1, 65))


def other_numbers(draw: st.DrawFn, case: Case) -> None:
    floats = [name for name, tensor in case.inputs.items() if tensor.dtype.kind in "fV" and tensor.size]
    if not floats:
        return
    name = draw(st.sampled_from(floats))
    tensor = case.inputs[name] = case.inputs[name].copy()
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    numbers = draw(st.lists(st.sampled_from(list(NUMBERS)), min_size=1, max_size=3))
    share = draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    chosen = random.random(tensor.shape) < share
    chosen.reshape(-1)[draw(st.integers(0, tensor.size - 1))] = True
    with np.errstate(all="ignore"):
        tensor[chosen] = random.choice(np.array(numbers, np.float32), chosen.sum()).astype(tensor.dtype)


def outputs_in_the_memory_of_others(draw: st.DrawFn, case: Case) -> None:
    name = draw(st.sampled_from(STATE))
    alike = [
        other
        for other in case.inputs
        if other != name and case.inputs[name].size and case.inputs[other].nbytes >= case.inputs[name].nbytes
    ]
    if alike and not case.shift:
        case.written[name] = draw(st.sampled_from(alike))


SPOIL: list[Callable[[st.DrawFn, Case], None]] = [
    lengths_that_lie,
    lengths_that_lie,
    other_attributes,
    other_attributes,
    another_shape,
    states_of_other_pages,
    unused_states_of_no_shape,
    another_type,
    memory_at_any_address,
    outputs_in_the_memory_of_others,
    other_numbers,
    other_numbers,
    other_numbers,
]


@st.composite
def hostile(draw: st.DrawFn) -> Case:
    case = draw(honest())
    for spoil in draw(st.lists(st.sampled_from(SPOIL), max_size=3)):
        spoil(draw, case)
    return case


def test_an_error_that_changes_nothing_or_a_result_that_is_defined(instructions: str) -> None:
    found: Counter[bool] = Counter()

    @given(hostile())
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    def no_crash(case: Case) -> None:
        found[check(case)] += 1

    no_crash()
    assert min(found[False], found[True]) > 0, "results and errors were to be tried both"


# Each fault by itself.


def fixed(storage: str = "int8", *, rows: int = 2, columns: int = 3, pages: int = 6, **others: Any) -> Case:
    """Return an honest call that streams, has all the states and may wrap, but for ``others``."""
    attributes = attributes_of(**{"storage": storage, "policies": [1], "sinks": 5, "recent": 20, **others})
    random = np.random.default_rng(0)
    state = {
        name: (random.random(tensor.shape) * 15).astype(tensor.dtype)
        for name, tensor in attributes.state(rows, pages, unit_of(attributes.storage)).zeros().items()
    }
    arrays = {**tokens_of(attributes, columns, batch=rows, sink_logits=True, sink_query=True), **state}
    arrays |= {"past": np.full(rows, 70), "new": np.full(rows, columns)}
    return Case(attributes.for_node(), {name: arrays[name] for name in (*INPUTS, *STATE)}, in_place=True)


@pytest.mark.parametrize("name", [name for name in (*INPUTS, *STATE) if name not in ("keys", "values")])
def test_memory_that_is_no_multiple_is_refused(name: str) -> None:
    case = fixed(policies=[2])
    case.shift[name] = 1 if name == "scales" else 2
    says = run(case)
    assert isinstance(says, str)
    assert f"{name} lies at no multiple of" in says


def test_codes_may_lie_anywhere() -> None:
    case = fixed()
    case.shift = {"keys": 1, "values": 3}
    assert check(case)


@pytest.mark.parametrize("in_place", [True, False])
def test_an_output_in_the_memory_of_another_tensor_is_refused(in_place: bool) -> None:
    case = fixed()
    case.in_place, case.written = in_place, {"keys": "values"}
    says = run(case)
    assert isinstance(says, str)
    assert "output 1 lies in the memory of values" in says


@pytest.mark.parametrize("huge", [2**31, 2**40, 2**58, 2**62])
@pytest.mark.parametrize("storage", STORAGES)
def test_sizes_beyond_memory_where_there_are_no_rows(storage: str, huge: int) -> None:
    for axis, names in ((1, ("query", "key", "value", "sink_query")), (2, ("keys", "values", "scales"))):
        case = fixed(storage, rows=0)
        for name in names:
            case.says[name] = list(case.inputs[name].shape)
            case.says[name][axis] = huge
        case.in_place = False
        found = run(case)
        assert isinstance(found, str) or all(0 in each.shape() for each in found)


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFFC12345])
@pytest.mark.parametrize("name", ["query", "key", "value", "sink_logits", "scales", "recent"])
def test_no_number_of_any_bits_reaches_y(instructions: str, name: str, bits: int) -> None:
    case = fixed(recent=40)
    if name == "scales":
        case.inputs[name].view(np.uint16)[...] = bits >> 16 & 0x8000 | 0x7C01 | bits & 0x3FF  # a NaN of float16
    else:
        case.inputs[name].view(np.uint32)[...] = bits
    found = run(case)
    assert not isinstance(found, str), found
    assert np.isnan(found[0].numpy()).all()


FAR = [2**31, 2**32, 2**53, 2**62 - 1000]


# places of pages are found alike for all storages: each has two of the distances
@pytest.mark.parametrize(
    ("storage", "far"),
    [(storage, FAR[(index + more) % 4]) for index, storage in enumerate(STORAGES) for more in (0, 2)],
)
def test_positions_of_a_cache_that_has_run_for_years(instructions: str, storage: str, far: int) -> None:
    # pages and slots lie where they lay after `period` tokens: a ring of pages with 3 slots
    attributes = attributes_of(storage=storage, policies=[1], sinks=20, recent=15, sink_pages=2, recent_pages=2)
    calls = (1, 1, 17, 1, 5, 16, 33 - 16, 1, 1)
    tokens = tokens_of(attributes, sum(calls), batch=2, sink_logits=True, sink_query=True)
    period, first = (6 - attributes.first_pages) * 3 * attributes.page, 16 * attributes.page
    # positions 16 pages on have wrapped, and are of the same offsets, pages and slots as those far on
    near = first + (far - first) % period
    bounded = Bounded()
    caches = [
        Fed(attributes, tokens, 6, bounded),
        *(Fed(attributes, tokens, 6, Native(2, in_place=True)) for _ in range(2)),
    ]
    random = np.random.default_rng(1)
    state = {name: (random.random(tensor.shape) * 9).astype(tensor.dtype) for name, tensor in caches[0].state.items()}
    for cache, past in zip(caches, (far, far, near), strict=True):
        cache.state, cache.past = dict(state), np.array([past, past + period])
    for columns in calls:
        expected, y, same = (cache.call(columns) for cache in caches)
        assert (np.abs(y - expected) <= bounded.most).all()
        assert np.array_equal(y, same)
        for cache in caches[1:]:
            assert_same_state(caches[0].state, cache.state)
