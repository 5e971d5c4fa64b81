"""The body of KVAttention, run by an onnxruntime without a library of ours, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.runtime_ops import DOMAIN, OPERATORS, declare
from graphopt.runtime_ops.kv_attention.spec.attributes import STORAGES, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.body import overload
from graphopt.runtime_ops.kv_attention.spec.op import KV_ATTENTION
from graphopt.runtime_ops.kv_attention.spec.reference import reference
from tests.runtime_ops.kv_cases import (
    INPUTS,
    PAIRS,
    STATE,
    Body,
    Fed,
    assert_float16_is_widened,
    assert_same_state,
    attributes_of,
    model_of,
    open_quietly,
    tokens_of,
    unit_of,
)

EACH_STORAGE = pytest.mark.parametrize("storage", STORAGES)

# float32 of scores and sums: some 2^-24 for each of at most 200 terms near 1, in practice far less
CLOSE = 4e-6

POLICIES: dict[str, dict[str, Any]] = {
    "dense": {},
    "window": {"window": 21, "softcap": 3.0},
    "streaming": {"policies": (1,), "sinks": 18, "recent": 20},
    "chunks": {"policies": (1,), "recent": 21, "window": 21, "chunks": 1},
    "streaming in a window": {"policies": (1,), "sinks": 3, "recent": 30, "window": 25},
    "bounds": {"policies": (2,), "sinks": 3, "recent": 10, "budget": 2},
    "mean": {"policies": (2,), "recent": 10, "budget": 1, "summary": "mean", "window": 60},
    "no budget": {"policies": (2,), "recent": 10},
    "heads": {"kv_heads": 3, "policies": (2, 0, 1), "sinks": 3, "recent": 10, "budget": 1},
}

BLOCKS = {"query_block": 6, "query_stride": 3, "prefill_mass": 0.7}

# what they add is the same whatever pages are stored as
SELECTIONS: dict[str, dict[str, Any]] = {
    "mass": {"policies": (2,), "sinks": 3, "recent": 10, "mass": 0.7},
    "mass within a budget": {"policies": (2, 0), "recent": 10, "budget": 2, "mass": 0.9, "summary": "mean"},
    "channels": {"policies": (2,), "sinks": 3, "recent": 10, "budget": 2, "channels": 5},
    "channels of means": {"policies": (2,), "recent": 7, "mass": 0.6, "channels": 9, "summary": "mean", "window": 70},
    "streaming, compensated": {"policies": (1,), "sinks": 18, "recent": 20, "compensate": 1, "softcap": 3.0},
    "bounds in chunks": {"policies": (2,), "sinks": 3, "recent": 10, "budget": 1, "window": 40, "chunks": 1},
    "prefill": {"policies": (3,), "sinks": 3, "recent": 10, **BLOCKS},
    "prefill of heads": {"kv_heads": 3, "policies": (3, 0, 1), "recent": 5, "window": 50, "softcap": 3.0, **BLOCKS},
    "compensated heads": {"kv_heads": 3, "policies": (2, 0, 1), "recent": 9, "budget": 1, "compensate": 1},
}


def compare(attributes: Any, tokens: Any, pages: int, calls: list[tuple[int, ...]], run: Body, **state: Any) -> None:
    """Feed body and reference alike; the first number of a call is its columns, the others are tokens of rows."""
    expected, fed = Fed(attributes, tokens, pages), Fed(attributes, tokens, pages, run)
    for each in (expected, fed):
        each.state |= state
    for columns, *new in calls:
        y, other = (each.call(columns, new or None) for each in (expected, fed))
        assert other.dtype == np.float32
        assert np.abs(y - other).max() < CLOSE
        if attributes.compensate or (attributes.retrieves and attributes.summary == "mean"):
            # the body sums keys and divides, the reference goes token by token
            means = [each.state.pop("summaries") for each in (expected, fed)]
            assert np.abs(means[0] - means[1]).max() < CLOSE
            fed.state["summaries"] = expected.state["summaries"] = means[0]
        assert_same_state(expected.state, fed.state)


# The body appends by storage and reads by policy, and the state is all that they share. So each policy reads floats and
# codes; each storage has pages that are used again; and heads have different policies in some.
FLOATS = [storage for storage in STORAGES if not storage.startswith("int")]
CODES = [storage for storage in STORAGES if storage.startswith("int")]
CASES = [(storage, "streaming") for storage in STORAGES] + [(storage, "heads") for storage in STORAGES[::3]]
for each in (FLOATS, CODES):
    others = (policy for policy in POLICIES if policy not in ("streaming", "heads"))
    CASES += [(each[index % len(each)], policy) for index, policy in enumerate(others)]
CASES += [(STORAGES[index % len(STORAGES)], policy) for index, policy in enumerate(SELECTIONS)]


@pytest.mark.parametrize(("storage", "policy"), CASES)
def test_every_policy_and_storage(storage: str, policy: str) -> None:
    attributes = attributes_of(storage=storage, sink_pages=1, recent_pages=1, **(POLICIES | SELECTIONS)[policy])
    tokens = tokens_of(attributes, 131, batch=2, group=3, head_size=32, sink_logits=True, sink_query=True)
    pages = 6 + attributes.compensate if policy.startswith("streaming") else 9
    calls = [(12, 12, 5), (1,), (7, 0, 7), (1, 1, 0), *((12,),) * 9, (1,), (1,)]
    compare(attributes, tokens, pages, calls, Body())


@pytest.mark.parametrize(
    ("storage", "others"), [("float32", {}), ("int8", {"policies": (1,), "sinks": 18, "recent": 20})]
)
def test_biases_by_distance(storage: str, others: dict[str, Any]) -> None:
    slopes = [0.5, 0.25, 0.0, 0.125, 0.0625, -0.03125]
    attributes = attributes_of(storage=storage, sink_pages=1, recent_pages=1, slopes=slopes, **others)
    tokens = tokens_of(attributes, 80, batch=2, group=3, sink_logits=True, sink_query=True)
    calls = [(12, 12, 5), (1,), (7, 0, 7), (1, 1, 0), *((12,),) * 4, (1,), (1,)]
    compare(attributes, tokens, 7, calls, Body())


@pytest.mark.parametrize(
    ("storage", "page"), [(storage, (16, 64)[index % 2]) for index, storage in enumerate(STORAGES)]
)
def test_long_calls(storage: str, page: int) -> None:
    # more than one page leaves at once, and slots are filled twice in one call
    attributes = attributes_of(storage=storage, page=page, policies=(0, 2), budget=1, recent=9)
    tokens = tokens_of(attributes, 210, batch=2)
    compare(attributes, tokens, -(-210 // page), [(5,), (120, 120, 77), (84,), (1,)], Body())


@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_keys_and_values_of_different_bits(keys: str, values: str) -> None:
    attributes = attributes_of(storage=keys, value_storage=values, recent_pages=1, token_factors=int(values == "int2"))
    tokens = tokens_of(attributes, 100, batch=2)
    compare(attributes, tokens, -(-100 // attributes.page), [(80, 80, 30), (19,), (1,)], Body())


@pytest.mark.parametrize("storage", ["int6", "int4", "int3", "int2"])
def test_errors_of_channels_go_to_those_behind_them(storage: str) -> None:
    attributes = attributes_of(storage=storage, key_feedback=1, clip=0.8, token_factors=int(storage == "int2"))
    tokens = tokens_of(attributes, 100, batch=2)
    compare(attributes, tokens, -(-100 // attributes.page), [(80, 80, 30), (19,), (1,)], Body())


@pytest.mark.parametrize("storage", ["float32", "float8", "int4"])
def test_queries_of_float16(storage: str) -> None:
    options: dict[str, Any] = {"storage": storage, "policies": (1, 2), "budget": 1}
    assert_float16_is_widened(Body(), Body(activations=ir.DataType.FLOAT16), **options)


@given(
    st.sampled_from(STORAGES),
    st.sampled_from(sorted(POLICIES | SELECTIONS)),
    st.integers(0, 2),
    st.integers(0, 2),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4),
)
@settings(max_examples=12, deadline=None)
def test_any_calls(
    storage: str, policy: str, sink_pages: int, recent_pages: int, calls: list[tuple[int, int, int]]
) -> None:
    attributes = attributes_of(
        storage=storage, sink_pages=sink_pages, recent_pages=recent_pages, scale=0.5, **(POLICIES | SELECTIONS)[policy]
    )
    fitting = [(columns, min(columns, one), min(columns, other)) for columns, one, other in calls]
    tokens = tokens_of(attributes, sum(columns for columns, *_ in fitting), batch=2)
    compare(attributes, tokens, 11, fitting, Body())


@EACH_STORAGE
def test_what_is_left_in_memory_is_not_read(storage: str) -> None:
    attributes = attributes_of(storage=storage, policies=(0, 2), budget=1, recent_pages=1)
    shapes = attributes.state(1, 5, unit_of(storage))
    state = {}
    for name, tensor in shapes:
        filling = 255 if tensor.dtype == np.uint8 else np.nan
        state[name] = np.full(tensor.zeros().shape, filling, tensor.dtype)
    compare(attributes, tokens_of(attributes, 70), 5, [(20,), (1,), (30,), (19,)], Body(), **state)


@EACH_STORAGE
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_is_not_finite_stays_with_those_who_read_it(storage: str, where: str) -> None:
    attributes = attributes_of(storage=storage, policies=(1,), recent=8, recent_pages=1)
    tokens = tokens_of(attributes, 60)
    for position, bad in ((12, np.nan), (40, np.inf), (50, -np.inf)):
        tokens[where][0, position, 3] = bad
    y, other = (Fed(attributes, tokens, 4, run).call(60) for run in (reference, Body()))
    assert np.array_equal(np.isnan(y), np.isnan(other))
    assert 0 < np.isnan(y).mean() < 1


OPSETS = (23, 24, 25, 26)
OF_OPSETS = ("float16", "bfloat16", "float8", "int4")


# every opset with every storage; and each of them with shapes that are stated and with shapes that are not
@pytest.mark.parametrize(
    ("opset", "static", "storage"),
    [(opset, (opset + index) % 2 == 0, storage) for opset in OPSETS for index, storage in enumerate(OF_OPSETS)],
)
def test_opsets_and_shapes(opset: int, static: bool, storage: str) -> None:
    attributes = attributes_of(storage=storage, policies=(0, 2), budget=1, sinks=2)
    tokens = tokens_of(attributes, 40, batch=2)
    compare(attributes, tokens, 3, [(20, 20, 3), (20,)], Body(static=static, opset=opset))


def test_states_that_are_not_used_need_no_shape() -> None:
    attributes, nothing = attributes_of(), np.zeros((0, 0, 0, 0), np.float32)
    fed = Fed(attributes, tokens_of(attributes, 20), 2, Body())
    fed.state |= {"scales": nothing.astype(np.float16), "recent": nothing, "summaries": nothing}
    y = fed.call(20)
    assert np.abs(y - Fed(attributes, fed.tokens, 2).call(20)).max() < CLOSE
    assert fed.state["scales"].shape == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("others", "past", "new"),
    [
        ({}, -1, 1),
        ({}, 0, -1),
        ({}, 0, 5),
        ({}, 29, 4),
        ({}, 1 << 62, 1),
        ({}, (1 << 63) - 1, 4),
        ({"policies": (1,), "recent": 13}, 1000, 4),
        ({"policies": (1,), "recent": 3, "window": 13}, 1000, 4),
        ({"policies": (1,), "recent": 3, "sinks": 17}, 1000, 4),
        ({"policies": (1,), "recent": 12, "compensate": 1}, 1000, 4),
    ],
)
def test_refusals(others: dict[str, Any], past: int, new: int) -> None:
    attributes = attributes_of(**others)
    fed = Fed(attributes, tokens_of(attributes, 4), 2, Body())
    fed.past = np.array([past])
    with pytest.raises(Exception, match="Gather.*out of data bounds"):
        fed.call(4, [new])
    with pytest.raises(ValueError, match="KVAttention: "):
        Fed(attributes, fed.tokens, 2).call(4, [new]) if past == 0 else fed_from(fed, past, new)
    attributes = attributes_of(policies=(1,), recent=12)
    fed = Fed(attributes, tokens_of(attributes, 4), 2, Body())
    fed.past = np.array([1000])
    assert np.isfinite(fed.call(4)).all()


def fed_from(fed: Fed, past: int, new: int) -> None:
    other = Fed(fed.attributes, fed.tokens, 2)
    other.past = np.array([past])
    other.call(4, [new])


def name_of(attributes: KVAttributes) -> str:
    return overload(**attributes.for_node())


def test_each_set_of_attributes_has_its_body() -> None:
    one, other = attributes_of(), attributes_of(storage="int8", scale=0.1)
    shapes: dict[str, Any] = {name: [None] * 3 for name in INPUTS[:3]}
    shapes |= {"past": [None], "new": [None], "sink_logits": [0], "sink_query": [0]}
    shapes |= {name: [None] * 4 for name in STATE}
    model = model_of(one, shapes)
    assert set(model.functions) == {(DOMAIN, "KVAttention", name_of(one))}
    node = next(iter(model.graph))
    assert node.overload == name_of(one)
    again = KV_ATTENTION.node([], other.for_node())
    model.graph.append(again)
    declare(model)
    assert {key[2] for key in model.functions} == {name_of(one), name_of(other)}
    # a body that is no longer used is removed
    model.graph.remove(again)
    declare(model)
    assert {key[2] for key in model.functions} == {name_of(one)}
    onnx.checker.check_model(ir.to_proto(model))


def test_a_body_stays_as_long_as_it_is_as_it_was_made() -> None:
    attributes = attributes_of()
    shapes: dict[str, Any] = {name: [None] * 3 for name in INPUTS[:3]}
    shapes |= {"past": [None], "new": [None], "sink_logits": [0], "sink_query": [0]}
    shapes |= {name: [None] * 4 for name in STATE}
    model = model_of(attributes, shapes)
    (key,) = model.functions
    kept = model.functions[key]
    declare(model)
    assert model.functions[key] is kept
    copied = model.clone()
    declare(copied)
    assert copied.functions[key] is kept
    expected = ir.to_proto(kept).SerializeToString(deterministic=True)

    def swap_inputs(body: ir.Function) -> None:
        node = next(node for node in body.all_nodes() if node.op_type == "Sub")
        one, other = node.inputs
        node.replace_input_with(0, other)
        node.replace_input_with(1, one)

    def change_attribute(body: ir.Function) -> None:
        node = next(node for node in body.all_nodes() if node.op_type == "Cast")
        node.attributes["to"] = ir.AttrInt64("to", 11)

    def change_operator(body: ir.Function) -> None:
        next(node for node in body.all_nodes() if node.op_type == "Add").op_type = "Mul"

    def rename(body: ir.Function) -> None:
        next(node for node in body.all_nodes() if node.op_type == "Add").outputs[0].name = "another"

    def change_opset(body: ir.Function) -> None:
        body.opset_imports[""] = 25

    for change in (swap_inputs, change_attribute, change_operator, rename, change_opset):
        changed = model.clone()
        changed.functions[key] = ir.Function.clone(kept)
        change(changed.functions[key])
        assert ir.to_proto(changed.functions[key]).SerializeToString(deterministic=True) != expected
        declare(changed)
        assert changed.functions[key] is kept, change.__name__
        # what no pass may do, as all models would have it
        change(kept)
        declare(changed)
        kept = changed.functions[key]
        assert ir.to_proto(kept).SerializeToString(deterministic=True) == expected, change.__name__
    # of a file it is not known how it was made
    declare(model)
    read = ir.from_proto(ir.to_proto(model))
    before = read.functions[key]
    declare(read)
    assert read.functions[key] is not before


def test_layers_with_other_windows_and_policies_share_a_body() -> None:
    names = {name_of(attributes_of(window=window, policies=each)) for window in (0, 7) for each in ((0,), (1,), (0, 1))}
    assert len(names) == 1
    retrieving = {name_of(attributes_of(policies=each)) for each in ((2,), (0, 2), (2, 1))}
    assert len(retrieving) == 1
    assert names.isdisjoint(retrieving)


def test_two_layers_of_one_body() -> None:
    one, other = attributes_of(window=5), attributes_of(policies=(0, 1), recent=1)
    fed = Fed(one, tokens_of(one, 20), 2)
    shapes: dict[str, Any] = {name: [None] * array.ndim for name, array in fed.tokens.items()}
    shapes |= {"past": [None], "new": [None], **{name: [None] * 4 for name in STATE}}
    model = model_of(one, shapes)
    second = ir.node("KVAttention", model.graph.inputs, other.for_node(), domain=DOMAIN, version=None, num_outputs=6)
    second.outputs[0].name, second.outputs[0].type = "second", ir.TensorType(ir.DataType.FLOAT)
    model.graph.append(second)
    model.graph.outputs.append(second.outputs[0])
    declare(model)
    assert len(model.functions) == 1
    inputs = {**fed.tokens, "past": np.array([0]), "new": np.array([20]), **fed.state}
    y, *_, y_second = open_quietly(model).run(None, inputs)
    assert np.abs(y - fed.call(20)).max() < CLOSE
    assert np.abs(y_second - Fed(other, fed.tokens, 2).call(20)).max() < CLOSE


def test_a_float_of_a_file_names_the_same_body() -> None:
    attributes = attributes_of(scale=0.1)
    node = ir.serde.deserialize_node(ir.to_proto(KV_ATTENTION.node([], attributes.for_node())))
    assert KV_ATTENTION.overload_of(node) == KV_ATTENTION.body_of(node, 23).overload == name_of(attributes)
    assert "scale=0.1," in name_of(attributes)


@pytest.mark.parametrize(
    "other",
    [
        {"scale": 0.26},
        {"policies": [0, 2]},
        {"recent": 2},
        {"summary": "mean"},
        {"storage": "float16"},
        {"sinks": 1},
        {"mass": 0.5},
        {"channels": 3},
    ],
)
def test_a_body_for_other_attributes_fails(other: dict[str, Any]) -> None:
    # as in an onnxruntime without overloads
    attributes = attributes_of()
    fed = Fed(attributes, tokens_of(attributes, 4), 1)
    shapes: dict[str, Any] = {name: [None] * array.ndim for name, array in fed.tokens.items()}
    shapes |= {"past": [None], "new": [None], **{name: [None] * 4 for name in STATE}}
    model = model_of(attributes, shapes)
    node = next(iter(model.graph))
    for name, value in other.items():
        node.attributes[name] = ir.convenience.convert_attribute(name, value)
    inputs = {**fed.tokens, "past": np.array([0]), "new": np.array([4]), **fed.state}
    with pytest.raises(Exception, match="Gather.*out of data bounds|indices element out of data bounds"):
        open_quietly(model).run(None, inputs)


def test_attributes_that_allow_no_body() -> None:
    node = KV_ATTENTION.node([], {**attributes_of().for_node(), "page": 17})
    for ask in (KV_ATTENTION.overload_of, lambda node: KV_ATTENTION.body_of(node, 23)):
        with pytest.raises(ValueError, match="page is one of .*, not 17"):
            ask(node)


@pytest.mark.parametrize("storage", ["float32", "int8", "int4"])
def test_cost(storage: str) -> None:
    attributes = attributes_of(storage=storage, policies=(2,))
    shapes = {name: array.shape for name, array in tokens_of(attributes, 3).items()}
    shapes |= {"past": (1,), "new": (1,)}
    state = attributes.state(1, 5, unit_of(storage))
    cost = KV_ATTENTION.cost([shapes[name] for name in INPUTS] + [tensor.zeros().shape for _, tensor in state])
    # 4 heads, 3 queries, 80 tokens of 16 channels, for each a product with its key and one with its value
    assert cost.operations == 2 * 2 * 4 * 3 * 80 * 16
    assert cost.bytes == state.bytes + 4 * (2 * 3 * 64 + 2 * 3 * 32)


def test_it_is_registered() -> None:
    assert OPERATORS["KVAttention"] is KV_ATTENTION
