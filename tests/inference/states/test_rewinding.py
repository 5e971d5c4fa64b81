"""Rewinding and moving pages, against the operator's definition of what a token does to the state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphopt.analysis.structure.paged_caches import PagedLayer
from graphopt.errors import InputError
from graphopt.inference.states.buffers import HostBuffer, Row
from graphopt.inference.states.pages import move_pages
from graphopt.inference.states.rewinding import check_length, first_length, rewind_row
from graphopt.runtime_ops.kv_attention.spec.append import State, append, row_of
from graphopt.runtime_ops.kv_attention.spec.attributes import STORAGES, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.readings import stored_tokens
from tests.runtime_ops.kv_cases import PAIRS, Fed, tokens_of, unit_of

HEADS, SIZE, PAGE = 2, 32, 16  # a head of every storage; a page of most, see unit_of
EACH_STORAGE = st.sampled_from(STORAGES)


def state_of_keys(layer: PagedLayer, pages: int, rows: list[np.ndarray]) -> State:
    """The state after the keys of each row, [n, HEADS, SIZE]; values are their negatives."""
    empty = layer.attributes.state(len(rows), pages, SIZE).zeros()
    longest = max(len(row) for row in rows)
    keys = np.zeros((len(rows), longest, HEADS, SIZE), np.float32)
    for index, row in enumerate(rows):
        keys[index, longest - len(row) :] = row
    counts = np.array([len(row) for row in rows])
    return append(layer.attributes, empty, keys, -keys, np.zeros(len(rows), np.int64), counts)


def first_row(state: State) -> dict[str, Row]:
    """The states of the first row, where they lie."""
    return {name: Row(HostBuffer(tensor), 0) for name, tensor in state.items()}


def by_token(name: str, page: np.ndarray) -> np.ndarray:
    """A page of keys or values as float storages lay it out, with its tokens in front."""
    return (
        page.reshape(HEADS, SIZE, PAGE).transpose(2, 0, 1)
        if name == "keys"
        else page.reshape(HEADS, PAGE, SIZE).swapaxes(0, 1)
    )


def random_keys(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, HEADS, SIZE)).astype(np.float32)


@given(
    storages=st.sampled_from([*((storage, "") for storage in STORAGES), *PAIRS]),
    summary=st.sampled_from(["bounds", "mean"]),
    sink_pages=st.integers(0, 2),
    recent_pages=st.integers(0, 2),
    compensate=st.booleans(),
    tokens=st.integers(1, 110),
    data=st.data(),
)
def test_a_rewound_row_goes_on_as_one_that_was_never_longer(
    storages: tuple[str, str],
    summary: str,
    sink_pages: int,
    recent_pages: int,
    compensate: bool,
    tokens: int,
    data: st.DataObject,
) -> None:
    storage, of_values = storages
    integers = {"sink_pages": sink_pages, "recent_pages": recent_pages} if storage.startswith("int") else {}
    means = {"sinks": data.draw(st.integers(0, 40)), "compensate": 1} if compensate else {}
    of_page = max(unit_of(name) for name in storages if name)
    kv = KVAttributes(
        HEADS,
        1.0,
        page=of_page,
        storage=storage,
        value_storage=of_values,
        policies=(2, 1),
        summary=summary,
        **integers,
        **means,
    )
    layer = PagedLayer(0, SIZE, kv)
    length = data.draw(st.integers(1, tokens))
    first, second = random_keys(0, tokens), random_keys(1, 40)
    rewound = state_of_keys(layer, 10, [first])
    rewind_row(layer, first_row(rewound), tokens, length)
    after = append(kv, rewound, second[None], -second[None], np.array([length]), np.array([40]))
    straight = state_of_keys(layer, 10, [np.concatenate([first[:length], second])])
    total = length + 40
    for page in range(-(-total // of_page)):
        valid = min(of_page, total - page * of_page)
        # narrow keys are rounded before a summary is made of them again, up to half of the last place of a 4, and codes
        # are rounded once more: half a step of numbers up to 4 in 15 levels, twice
        summaries = [state["summaries"][0, :, page] for state in (after, straight)]
        narrow = {"float16": 2**-9, "bfloat16": 2**-6, "float8": 2**-2}
        levels = min(kv.levels or 0, kv.value_levels or 0)
        rounding = 8 / levels if levels else {"float32": 1e-6, **narrow}[storage]
        assert np.abs(summaries[0] - summaries[1]).max() <= rounding
        if not kv.levels:
            for name in ("keys", "values"):
                pages_of_states = [by_token(name, state[name][0, :, page])[:valid] for state in (after, straight)]
                assert np.array_equal(*pages_of_states)
        elif kv.is_recent(page, total):
            slots = [
                state["recent"][0, :, int(kv.slot(page))].reshape(HEADS, 2, of_page, SIZE)[:, :, :valid]
                for state in (after, straight)
            ]
            assert np.abs(slots[0] - slots[1]).max() <= rounding


def test_keys_with_factors_become_the_floats_that_were_read() -> None:
    kv = KVAttributes(HEADS, 1.0, page=PAGE, storage="int4", token_factors=1)
    layer, keys = (
        PagedLayer(0, SIZE, kv),
        random_keys(3, 2 * PAGE) * np.linspace(1, 9, 2 * PAGE, dtype=np.float32)[:, None, None],
    )
    state = state_of_keys(layer, 2, [keys])
    floats = [
        [numbers.numbers for numbers in stored_tokens(kv, row_of(state, 0), head, np.arange(PAGE), 2 * PAGE, SIZE)]
        for head in range(HEADS)
    ]
    rewind_row(layer, first_row(state), 2 * PAGE, PAGE)
    slot = state["recent"][0, :, int(kv.slot(0))].reshape(HEADS, 2, PAGE, SIZE)
    # a product and a sum in float32, and a product with the factor
    np.testing.assert_allclose(slot, floats, rtol=0, atol=2**-20 * np.abs(keys).max())


@given(
    storage=EACH_STORAGE,
    sinks=st.integers(0, 40),
    recent=st.integers(1, 40),
    tokens=st.integers(60, 180),
    data=st.data(),
)
@settings(max_examples=40)
def test_a_rewound_ring_still_has_the_mean_of_what_it_dropped(
    storage: str, sinks: int, recent: int, tokens: int, data: st.DataObject
) -> None:
    of_page = unit_of(storage)
    kv = KVAttributes(
        HEADS, 1.0, page=of_page, storage=storage, policies=(1,), sinks=sinks, recent=recent, compensate=1
    )
    layer, total = PagedLayer(0, SIZE, kv), tokens + 20
    pages = layer.pages(1 << 40, 7)
    drawn_tokens = tokens_of(kv, total, head_size=SIZE, seed=1)
    row = Fed(kv, drawn_tokens, pages)
    keys, values = (drawn_tokens[name][:, :tokens].reshape(1, tokens, HEADS, SIZE) for name in ("key", "value"))
    row.state = append(kv, row.state, keys, values, np.zeros(1, np.int64), np.array([tokens]))
    row.past, row.column = np.array([tokens]), tokens
    oldest = max(0, -(-tokens // of_page) - (pages - kv.first_pages))
    first = first_length(layer, oldest)
    assume(first <= tokens)
    length = data.draw(st.integers(max(first, 1), tokens))
    check_length(layer, oldest, tokens, length, 0)
    if 1 < first < tokens:
        with pytest.raises(InputError, match="cannot be rewound"):
            check_length(layer, oldest, tokens, first - 1, 0)
    rewind_row(layer, first_row(row.state), tokens, length)
    row.past, row.column = np.array([length]), length
    straight = Fed(kv, drawn_tokens, -(-total // of_page))
    straight.call(length)
    # float16 and codes are what the page that was cut is read as: a share of 2^-11 of 4, or half a step of numbers up
    # to 4, in a mean; codes themselves are read, too, where straight rows have floats still
    narrow = {"float16": 4e-3, "bfloat16": 0.1, "float8": 2}
    codes = {"int8": 0.1, "int6": 0.5, "int4": 2, "int3": 4, "int2": 8, "int1": 8}
    rounding = {"float32": 1e-5, **narrow, **codes}[storage]
    for columns in (1, 7):
        assert np.abs(row.call(columns) - straight.call(columns)).max() < rounding


@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=3), new_pages=st.integers(1, 6), sinks=st.integers(0, 20)
)
def test_pages_move_to_where_a_larger_cache_would_have_them(lengths: list[int], new_pages: int, sinks: int) -> None:
    kv = KVAttributes(HEADS, 1.0, page=PAGE, policies=(1,), sinks=sinks, recent=20)
    layer = PagedLayer(0, SIZE, kv)
    pages = kv.first_pages + 3
    rows = [random_keys(index, length) for index, length in enumerate(lengths)]
    # token by token, as pages go round only for calls that leave what they read
    state = kv.state(len(rows), pages, SIZE).zeros()
    larger = kv.state(len(rows), pages + new_pages, SIZE).zeros()
    for position in range(max(lengths)):
        zeros = np.zeros((1, HEADS, SIZE), np.float32)
        keys = np.stack([row[position][None] if position < len(row) else zeros for row in rows])
        past = np.array([min(position, len(row)) for row in rows])
        new = np.array([int(position < len(row)) for row in rows])
        state = append(kv, state, keys, -keys, past, new)
        larger = append(kv, larger, keys, -keys, past, new)
    whole = -(-np.array(lengths) // PAGE)
    oldest = np.maximum(0, whole - (pages - kv.first_pages))
    for name in ("keys", "values"):
        target = np.zeros_like(larger[name])
        move_pages(layer, HostBuffer(state[name]), HostBuffer(target), np.array(lengths), oldest)
        for row, count in enumerate(whole):
            for page in range(count):
                if page < kv.first_pages or page >= oldest[row]:
                    slot, valid = int(kv.physical_page(page, pages + new_pages)), lengths[row] - page * PAGE
                    contents = [by_token(name, tensor[row, :, slot])[:valid] for tensor in (target, larger[name])]
                    assert np.array_equal(*contents)
