"""The reference of KVAttention against onnxruntime's ``Attention`` with masks written by hand, and against itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.runtime_ops.kv_attention.spec.attributes import STORAGES, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.reference import reference
from tests.runtime_ops.kv_cases import STATE, Arrays, Fed, assert_same_state, attributes_of, tokens_of

EACH_STORAGE = pytest.mark.parametrize("storage", STORAGES)

# onnxruntime computes in float32: sums of at most 256 terms, near 1, and exp of numbers below 16
CLOSE = 2e-5

# sums of float64 in another order
SAME = 1e-12


def standard(attributes: KVAttributes, tokens: Arrays, mask: np.ndarray) -> np.ndarray:
    """The operator ``Attention`` of onnxruntime; mask is bool [B, Hq, S, S]."""
    inputs = {name: tokens[name] for name in ("query", "key", "value")} | {"mask": mask}
    kinds = {name: ir.DataType.BOOL if name == "mask" else ir.DataType.FLOAT for name in inputs}
    values = [ir.val(name, kinds[name], ir.Shape(inputs[name].shape)) for name in inputs]
    group = tokens["query"].shape[2] // tokens["key"].shape[2]
    heads = {"q_num_heads": attributes.kv_heads * group, "kv_num_heads": attributes.kv_heads}
    node = ir.node("Attention", values, {**heads, "scale": attributes.scale, "softcap": attributes.softcap})
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 23}, name="one")
    model = ir.to_proto(ir.Model(graph, ir_version=11)).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


def causal(columns: int, window: int = 0, chunks: int = 0) -> np.ndarray:
    query, key = np.arange(columns)[:, None], np.arange(columns)[None]
    if chunks:
        return (key <= query) & (key // window == query // window)
    return (key <= query) & ((key > query - window) if window else True)


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"softcap": 2.0},
        {"window": 20},
        {"window": 12, "chunks": 1},
        {"scale": 1.5, "softcap": 5.0, "window": 3},
    ],
)
@pytest.mark.parametrize("calls", [(50,), (17, 1, 1, 31)])
def test_dense_is_attention(others: dict[str, Any], calls: tuple[int, ...]) -> None:
    attributes = attributes_of(**others)
    tokens = tokens_of(attributes, 50, batch=2, group=3, head_size=32)
    mask = np.broadcast_to(causal(50, attributes.window, attributes.chunks), (2, 6, 50, 50))
    assert np.abs(Fed(attributes, tokens, 4).calls(*calls) - standard(attributes, tokens, mask)).max() < CLOSE


def streaming_mask(columns: int, sinks: int, recent: int, window: int = 0) -> np.ndarray:
    query, key = np.arange(columns)[:, None], np.arange(columns)[None]
    return causal(columns, window) & ((key < sinks) | (key > query - recent))


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize(("sinks", "recent"), [(0, 1), (4, 16), (20, 7)])
def test_streaming_is_attention_with_a_mask(sinks: int, recent: int, window: int) -> None:
    attributes = attributes_of(policies=(1,), sinks=sinks, recent=recent, window=window)
    tokens = tokens_of(attributes, 70, batch=2)
    mask = np.broadcast_to(streaming_mask(70, sinks, recent, window), (2, 4, 70, 70))
    assert np.abs(Fed(attributes, tokens, 5).calls(33, 37) - standard(attributes, tokens, mask)).max() < CLOSE


def chosen_pages(attributes: KVAttributes, query: np.ndarray, key: np.ndarray, position: int, known: int) -> set[int]:
    """The pages that a query [G, D] chooses at ``position``; their summaries know the first ``known`` of all keys."""
    scores = {}
    for page in range(position // attributes.page + 1):
        first = page * attributes.page
        tokens = range(first, min(first + attributes.page, position + 1))
        if attributes.window:
            tokens = range(max(tokens.start, position - attributes.window + 1), tokens.stop)
        if all(t < attributes.sinks or t > position - attributes.recent for t in tokens):
            continue
        keys = key[first : min(first + attributes.page, known)].astype(np.float64)
        if attributes.summary == "mean":
            scores[page] = (query @ keys.mean(axis=0)).max()
        else:
            corners = np.maximum(query * keys.min(axis=0), query * keys.max(axis=0))
            scores[page] = corners.sum(axis=-1).max()
    return set(sorted(scores, key=lambda page: (-scores[page], page))[: attributes.budget])


@pytest.mark.parametrize("summary", ["bounds", "mean"])
@pytest.mark.parametrize("budget", [0, 1, 3])
@pytest.mark.parametrize("window", [0, 50])
def test_retrieval_is_attention_with_a_mask(summary: str, budget: int, window: int) -> None:
    columns = 90
    attributes = attributes_of(
        policies=(2,), sinks=5, recent=9, budget=budget, summary=summary, window=window, scale=1.0
    )
    tokens = tokens_of(attributes, columns, batch=2)
    page = np.arange(columns) // attributes.page
    mask = np.empty((2, 4, columns, columns), bool)
    for row in range(2):
        for head in range(4):
            mask[row, head] = streaming_mask(columns, 5, 9, window)
            key = tokens["key"][row, :, head // 2 * 16 :][:, :16]
            for position in range(columns):
                query = tokens["query"][row, position].reshape(2, 2, 16)[head // 2].astype(np.float64)
                known = 40 if position < 40 else columns
                chosen = chosen_pages(attributes, query, key, position, known)
                mask[row, head, position] |= np.isin(page, list(chosen)) & causal(columns, window)[position]
    assert np.abs(Fed(attributes, tokens, 6).calls(40, 50) - standard(attributes, tokens, mask)).max() < CLOSE


def test_of_equal_scores_the_lower_page() -> None:
    attributes = attributes_of(policies=(2,), budget=1, scale=1.0)
    tokens = tokens_of(attributes, 60)
    tokens["key"][:] = 1
    tokens["value"][:] = np.arange(60)[:, None]
    y = Fed(attributes, tokens, 4).calls(60)
    # the last token reads page 0, positions 0 to 15, and itself, all with the same weight
    assert y[0, 59] == pytest.approx((np.arange(16).sum() + 59) / 17)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("policy", [1, 2])
def test_a_budget_of_everything_is_dense(storage: str, policy: int) -> None:
    full = {"recent": 100} if policy == 1 else {"budget": 5}
    common = {"storage": storage, "recent_pages": 1, "window": 60}
    tokens = tokens_of(attributes_of(storage=storage), 70, batch=2, sink_logits=True, sink_query=True)
    sparse = Fed(attributes_of(policies=(policy,), sinks=3, **full, **common), tokens, 5).calls(65, 5)
    dense = Fed(attributes_of(sinks=3, **common), tokens, 5).calls(65, 5)
    assert np.array_equal(sparse, dense)


def test_each_head_has_its_policy() -> None:
    tokens = tokens_of(attributes_of(kv_heads=3), 60)
    others = {"kv_heads": 3, "sinks": 2, "recent": 5, "budget": 1}
    y = Fed(attributes_of(policies=(2, 0, 1), **others), tokens, 4).calls(60).reshape(60, 3, 32)
    for head, policy in enumerate((2, 0, 1)):
        alone = Fed(attributes_of(policies=(policy,), **others), tokens, 4).calls(60).reshape(60, 3, 32)
        assert np.array_equal(y[:, head], alone[:, head])


def test_a_sink_logit_is_a_token_without_a_value() -> None:
    attributes = attributes_of(kv_heads=1, scale=1.0)
    tokens = tokens_of(attributes, 20, sink_logits=True)
    y = Fed(attributes, tokens, 2).calls(20).reshape(20, 2, 16)
    query, logits = tokens["query"].reshape(20, 2, 16).astype(np.float64), tokens["sink_logits"]
    for head in range(2):
        weights = np.exp(query[:, head] @ tokens["key"][0].astype(np.float64).T) * causal(20)
        expected = weights @ tokens["value"][0] / (weights.sum(axis=1, keepdims=True) + np.exp(logits[head]))
        assert np.abs(y[:, head] - expected).max() < 1e-6  # of float32 logits


def test_the_sink_query_reads_the_sinks() -> None:
    attributes = attributes_of(kv_heads=1, scale=1.0, sinks=3)
    tokens = tokens_of(attributes, 20, sink_query=True)
    y = Fed(attributes, tokens, 2).calls(20).reshape(20, 2, 16)
    key, value = (tokens[name][0].astype(np.float64) for name in ("key", "value"))
    of_rest, of_sinks = (tokens[name].reshape(20, 2, 16).astype(np.float64) for name in ("query", "sink_query"))
    for head in range(2):
        scores = np.concatenate([of_sinks[:, head] @ key[:3].T, of_rest[:, head] @ key[3:].T], axis=1)
        weights = np.exp(scores) * causal(20)
        assert np.abs(y[:, head] - weights @ value / weights.sum(axis=1, keepdims=True)).max() < 1e-12


@EACH_STORAGE
def test_rows_of_different_lengths(storage: str) -> None:
    attributes = attributes_of(storage=storage, policies=(0, 2), budget=1, recent=4, sink_pages=1)
    tokens = tokens_of(attributes, 60, batch=3, sink_query=True)
    together = Fed(attributes, tokens, 4)
    y = np.concatenate([together.call(40, [40, 0, 33]), together.call(20, [20, 7, 19])], axis=1)
    for row, (first, second) in enumerate([(40, 20), (0, 7), (33, 19)]):
        own = [*range(40 - first, 40), *range(60 - second, 60)]
        alone = Fed(attributes, {k: v[row : row + 1, own] if v.ndim == 3 else v for k, v in tokens.items()}, 4)
        assert np.abs(y[row, own] - alone.calls(*(n for n in (first, second) if n))[0]).max() < SAME
        assert_same_state({name: tensor[row : row + 1] for name, tensor in together.state.items()}, alone.state)
        assert not np.delete(y[row], own, axis=0).any()


@EACH_STORAGE
def test_a_cache_that_wraps_is_a_longer_cache(storage: str) -> None:
    attributes = attributes_of(storage=storage, policies=(1,), sinks=18, recent=20, recent_pages=1, sink_pages=1)
    tokens = tokens_of(attributes, 300, batch=2)
    columns = (9, 1, 12, *(7,) * 39, 5)
    # 2 pages of sinks, and (P - F) T >= recent + S + T = 48
    wrapped, whole = (Fed(attributes, tokens, pages).calls(*columns) for pages in (5, 19))
    assert np.abs(wrapped - whole).max() < SAME


def appended(storage: str, summary: str, calls: list[int], pages: int, **others: Any) -> Arrays:
    attributes = attributes_of(storage=storage, policies=(0, 2), summary=summary, **others)
    fed = Fed(attributes, tokens_of(attributes, sum(calls), batch=2), pages)
    fed.calls(*calls)
    return fed.state


@given(
    st.sampled_from(STORAGES),
    st.sampled_from(["bounds", "mean"]),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(0, 2),
    st.integers(0, 2),
)
@settings(max_examples=40, deadline=None)
def test_appending_in_pieces_is_appending_at_once(
    storage: str, summary: str, calls: list[int], sink_pages: int, recent_pages: int
) -> None:
    others = {"sink_pages": sink_pages, "recent_pages": recent_pages}
    pages = -(-sum(calls) // 16)
    in_pieces, at_once = (appended(storage, summary, each, pages, **others) for each in (calls, [sum(calls)]))
    assert_same_state(in_pieces, at_once)


@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_integers_are_near_the_floats(storage: str) -> None:
    # a step of numbers within 4 is 8 / levels, and half of it is what a key or value is off at most
    near = {"int8": 0.04, "int4": 0.6}[storage]
    tokens = tokens_of(attributes_of(), 100)
    exact = Fed(attributes_of(), tokens, 7).calls(100)
    rounded = Fed(attributes_of(storage=storage), tokens, 7).calls(100)
    assert 0 < np.abs(rounded - exact).max() < near
    # pages that are kept as floats are not rounded
    kept = Fed(attributes_of(storage=storage, sink_pages=3, recent_pages=4), tokens, 7).calls(100)
    assert np.array_equal(kept, exact)


@EACH_STORAGE
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_is_not_finite_stays_with_those_who_read_it(storage: str, where: str) -> None:
    attributes = attributes_of(kv_heads=1, storage=storage, policies=(1,), recent=8, recent_pages=9)
    tokens = tokens_of(attributes, 60)
    for position, bad in ((20, np.nan), (40, np.inf), (50, -np.inf)):
        tokens[where][0, position, 3] = bad
    is_finite = np.isfinite(Fed(attributes, tokens, 4).calls(60)).all(axis=-1)[0]
    # float8 has no infinity: it stores the largest number
    readers = {*range(20, 28), *(() if storage == "float8" else (*range(40, 48), *range(50, 58)))}
    assert set(np.flatnonzero(~is_finite).tolist()) == readers


def test_a_page_that_is_not_finite_is_chosen() -> None:
    attributes = attributes_of(kv_heads=1, policies=(2,), budget=1)
    tokens = tokens_of(attributes, 60)
    tokens["key"][0, 20, 3] = np.nan
    y = Fed(attributes, tokens, 4).calls(60)
    assert np.isnan(y[0, 40:]).all()


def test_nothing_that_was_given_is_changed() -> None:
    attributes = attributes_of(storage="int8", policies=(2,))
    tokens = tokens_of(attributes, 40)
    fed = Fed(attributes, tokens, 3)
    before = fed.state
    fed.call(40)
    assert all(not before[name].any() for name in STATE)
    assert fed.state["keys"].any()


def call(attributes: KVAttributes, change: dict[str, Any], past: int = 0, new: int = 4) -> None:
    tokens = tokens_of(attributes, 4)
    inputs = {
        **tokens,
        "past": np.array([past]),
        "new": np.array([new]),
        **attributes.state(1, 2, 16).zeros(),
        **change,
    }
    order = ("query", "key", "value", "past", "new", "sink_logits", "sink_query", *STATE)
    reference(*(inputs[name] for name in order), **attributes.for_node())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": np.zeros((1, 4, 33), np.float32)}, r"key is \[B, S, 2 D\], not \[1, 4, 33\]"),
        ({"query": np.zeros((1, 4, 48), np.float32)}, r"query is \[1, 4, G 32\], not \[1, 4, 48\]"),
        ({"query": np.zeros((1, 4, 64))}, "query is float32 .* not float64"),
        ({"value": np.zeros((1, 3, 32), np.float32)}, r"value is float32 \[1, 4, 32\]"),
        ({"past": np.zeros(1, np.int32)}, "past is int64"),
        ({"new": np.zeros(2, np.int64)}, r"new is int64 \[1\], not int64 \[2\]"),
        ({"sink_logits": np.zeros(3, np.float32)}, r"sink_logits is float32 \[4\]"),
        ({"sink_query": np.zeros((1, 4, 32), np.float32)}, r"sink_query is float32 \[1, 4, 64\]"),
        ({"keys": np.zeros((1, 2, 2, 256), np.uint8)}, "keys is float32 .* not uint8"),
        ({"values": np.zeros((1, 2, 3, 256), np.float32)}, "values is float32"),
        ({"scales": np.zeros((1, 2, 2, 64), np.float16)}, r"scales is float16 \[1, 2, 2, 0\]"),
        ({"past": np.array([-1])}, r"past\[0\] is -1"),
        ({"new": np.array([5])}, r"new\[0\] is 5, which is not from 0 to the 4 columns"),
        ({"new": np.array([-1])}, r"new\[0\] is -1"),
        ({"past": np.array([29])}, "row 0 would have 33 tokens, and the cache holds 32, in 2 pages of 16"),
        ({"past": np.array([1 << 62])}, "more than 2\\^62"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(attributes_of(), change)


def test_what_is_not_used_may_have_any_shape_without_elements() -> None:
    nothing = np.zeros((0, 0, 0, 0), np.float32)
    scales = nothing.astype(np.float16)
    call(attributes_of(), {"scales": scales, "recent": nothing, "summaries": nothing})
    with pytest.raises(ValueError, match="scales is float16 .* not float16"):
        call(attributes_of(storage="int8"), {"scales": scales})
    with pytest.raises(ValueError, match="scales is float16 .* not float32"):
        call(attributes_of(), {"scales": nothing})


def test_only_a_cache_that_is_large_enough_wraps() -> None:
    call(attributes_of(policies=(1,), recent=12), {}, past=1000)
    with pytest.raises(ValueError, match="row 0 would have 1004 tokens"):
        call(attributes_of(policies=(1,), recent=13), {}, past=1000)
