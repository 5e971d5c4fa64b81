"""Tokens that move to another row, against the operator's definition of what the same numbers do to the state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.analysis.structure.paged_caches import PagedLayer
from graphopt.inference.states.buffers import HostBuffer, Row
from graphopt.inference.states.moving import append_tokens, move_tokens, read_tokens
from graphopt.runtime_ops.kv_attention.spec.append import State, append, row_of
from graphopt.runtime_ops.kv_attention.spec.attributes import STORAGES, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.readings import stored_tokens
from tests.runtime_ops.kv_cases import PAIRS, unit_of

HEADS, SIZE = 2, 32  # a head of every storage
CAPACITY = 8
"""Pages of a row: more than any test fills."""


def append_by_definition(kv: KVAttributes, state: State, keys: np.ndarray, values: np.ndarray, count: int) -> State:
    """The state of one row after more keys and values [HEADS, n, SIZE], by the definition."""
    token_rows = [numbers.transpose(1, 0, 2)[None] for numbers in (keys, values)]
    return append(kv, state, *token_rows, np.array([count]), np.array([keys.shape[1]]))


def rows_of(state: State) -> dict[str, Row]:
    """The states of the only row, where they lie."""
    return {name: Row(HostBuffer(tensor), 0) for name, tensor in state.items() if tensor.size}


def numbers_of(layer: PagedLayer, state: State, count: int) -> np.ndarray:
    """Keys and values [2, HEADS, n, SIZE] that a state of one row gives back, by the definition."""
    parts = [
        stored_tokens(layer.attributes, row_of(state, 0), head, np.arange(count), count, SIZE) for head in range(HEADS)
    ]
    return np.stack([[part.numbers for part in kinds] for kinds in zip(*parts, strict=True)]).astype(np.float32)


def random_tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, HEADS, count, SIZE)).astype(np.float32)


@given(
    storages=st.sampled_from([*((storage, "") for storage in STORAGES), *PAIRS]),
    options=st.fixed_dictionaries({"clip": st.sampled_from([1.0, 0.8]), "token_factors": st.integers(0, 1)}),
    policy=st.sampled_from([{}, {"policies": (2, 1), "summary": "mean", "budget": 1}, {"policies": (2, 0)}]),
    sinks=st.integers(0, 40),
    pages=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    counts=st.tuples(st.integers(1, 90), st.integers(0, 60)),
    data=st.data(),
)
def test_a_row_goes_on_with_the_numbers_of_another(
    storages: tuple[str, str],
    options: dict[str, float],
    policy: dict[str, object],
    sinks: int,
    pages: tuple[int, int],
    counts: tuple[int, int],
    data: st.DataObject,
) -> None:
    storage, of_values = storages
    integers = {"sink_pages": pages[0], "recent_pages": pages[1], **options} if storage.startswith("int") else {}
    means = {"sinks": sinks, "compensate": 1} if 1 in policy.get("policies", ()) else {}  # type: ignore[operator]
    page = max(unit_of(name) for name in storages if name)
    integers |= {"value_storage": of_values} if of_values else {}
    kv = KVAttributes(HEADS, 1.0, page=page, storage=storage, **integers, **policy, **means)  # type: ignore[arg-type]
    layer, (tokens, count) = PagedLayer(0, SIZE, kv), counts
    first = data.draw(st.integers(0, tokens - 1))
    end = data.draw(st.integers(first + 1, tokens))
    empty = kv.state(1, CAPACITY, SIZE).zeros()
    source = append_by_definition(kv, empty, *random_tokens(0, tokens), 0)
    before = append_by_definition(kv, empty, *random_tokens(1, count), 0)
    turn = data.draw(st.sampled_from([None, np.linalg.qr(random_tokens(2, SIZE)[0])[0]]))
    target = {name: tensor.copy() for name, tensor in before.items()}
    move_tokens(layer, rows_of(source), tokens, first, end, rows_of(target), count, turn)

    moved_keys, moved_values = numbers_of(layer, source, tokens)[:, :, first:end]
    turned_keys = moved_keys if turn is None else moved_keys @ turn.swapaxes(-1, -2)
    expected_state = append_by_definition(kv, before, turned_keys, moved_values, count)
    total = count + end - first
    expected, result = numbers_of(layer, expected_state, total), numbers_of(layer, target, total)
    # a number of codes may go the other way where it lies halfway between two: they were computed in another order
    step = 0.0 if kv.levels is None else 12 / min(kv.levels, kv.value_levels or kv.levels)
    assert (np.abs(expected - result) > 1e-4).mean() < 0.01 or options["clip"] < 1 or turn is None
    assert np.abs(expected - result).max() <= step + 1e-4 or options["clip"] < 1 or turn is None
    if kv.levels is None:
        assert np.allclose(expected, result, atol=0.15 if storage == "float8" and turn is not None else 1e-5)
    for name in ("summaries",) if kv.summarizes else ():
        in_use = -(-total // kv.page)
        assert np.allclose(expected_state[name][:, :, :in_use], target[name][:, :, :in_use], atol=1e-4)
    # and it goes on as any row
    later = random_tokens(3, 40)
    after = [
        numbers_of(layer, append_by_definition(kv, state, *later, total), total + 40)
        for state in (expected_state, target)
    ]
    assert np.allclose(after[0][:, :, total:], after[1][:, :, total:], atol=1e-4) or kv.levels is not None


@pytest.mark.parametrize("options", [{}, {"clip": 0.8}, {"token_factors": 1}], ids=["plain", "clip", "factors"])
@pytest.mark.parametrize("storage", ["int4", "int2"])
def test_values_keep_their_codes(storage: str, options: dict[str, float]) -> None:
    kv = KVAttributes(HEADS, 1.0, page=32, storage=storage, **options)  # type: ignore[arg-type]
    layer = PagedLayer(0, SIZE, kv)
    empty = kv.state(1, CAPACITY, SIZE).zeros()
    source = append_by_definition(kv, empty, *random_tokens(0, 200), 0)
    target = append_by_definition(kv, empty, *random_tokens(1, 5), 0)
    move_tokens(layer, rows_of(source), 200, 9, 180, rows_of(target), 5, None)
    values = [numbers_of(layer, state, count)[1] for state, count in ((source, 200), (target, 176))]
    # the page that is floats still, and those of float32 itself
    assert np.allclose(values[0][:, 9:180], values[1][:, 5:], atol=1e-6)


@pytest.mark.parametrize("storage", STORAGES)
def test_whole_pages_come_to_whole_pages_bit_by_bit(storage: str) -> None:
    kv = KVAttributes(HEADS, 1.0, page=unit_of(storage), storage=storage)
    layer, page = PagedLayer(0, SIZE, kv), kv.page
    empty = kv.state(1, CAPACITY, SIZE).zeros()
    source = append_by_definition(kv, empty, *random_tokens(0, 5 * page + 3), 0)
    target = append_by_definition(kv, empty, *random_tokens(1, page), 0)
    move_tokens(layer, rows_of(source), 5 * page + 3, 2 * page, 5 * page + 3, rows_of(target), page, None)
    for name in ("keys", "values", "scales"):
        assert np.array_equal(source[name][:, :, 2:5], target[name][:, :, 1:4]), name


def test_tokens_are_read_as_they_are_stored() -> None:
    kv = KVAttributes(HEADS, 1.0, page=16, storage="int8", sink_pages=1, recent_pages=1)
    layer = PagedLayer(0, SIZE, kv)
    state = append_by_definition(kv, kv.state(1, CAPACITY, SIZE).zeros(), *random_tokens(0, 100), 0)
    tokens = read_tokens(layer, rows_of(state), 7, 99, 100)
    assert np.allclose(np.stack([tokens.keys, tokens.values]), numbers_of(layer, state, 100)[:, :, 7:99], atol=1e-6)
    # the first page, the newest and the one before it are floats
    assert np.flatnonzero(tokens.is_rounded).tolist() == list(range(16 - 7, 80 - 7))
    empty = kv.state(1, CAPACITY, SIZE).zeros()
    append_tokens(layer, rows_of(empty), 0, tokens)
    assert np.allclose(numbers_of(layer, empty, 92)[1], tokens.values, atol=0.05)
