"""bfloat16 and float8 as storages: rounded alike by reference, body and kernel, and read as what their bits say."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.runtime_ops.kv_attention.spec.attributes import FLOATS
from graphopt.runtime_ops.kv_attention.spec.layout import pack_keys, pack_values, to_storage
from graphopt.runtime_ops.kv_attention.spec.reference import reference
from graphopt.runtime_ops.kv_attention.spec.storages.float8 import LARGEST
from tests.native import needs_library
from tests.runtime_ops.kv_cases import INPUTS, STATE, Body, Fed, Run, attributes_of, tokens_of
from tests.runtime_ops.kv_native import Native

NARROW = ("bfloat16", "float8")
EACH_STORAGE = pytest.mark.parametrize("storage", NARROW)


@pytest.fixture
def native(instructions: str) -> Native:
    """The kernel for one set of instructions, where this machine has it."""
    return Native()


ATTRIBUTES = {storage: attributes_of(kv_heads=1, storage=storage) for storage in NARROW}


def every_code(storage: str) -> np.ndarray:
    width = FLOATS[storage].itemsize
    return np.arange(1 << 8 * width).astype(f"u{width}").view(FLOATS[storage])


@cache
def ladder(storage: str) -> np.ndarray:
    """Every finite number of the type, float64 and rising; the one that comes behind the largest of bfloat16 too."""
    with np.errstate(invalid="ignore"):
        numbers = every_code(storage).astype(np.float64)
    beyond = [2.0**128, -(2.0**128)] if storage == "bfloat16" else []
    return np.unique([*numbers[np.isfinite(numbers)], *beyond])


def by_definition(x: np.ndarray, storage: str) -> np.ndarray:
    """The nearest number, the one with an even code of two; float64, and NaN for NaN."""
    known = ladder(storage)
    with np.errstate(invalid="ignore"):
        wanted = np.clip(np.nan_to_num(x.astype(np.float64), posinf=1e300, neginf=-1e300), known[0], known[-1])
    above = np.clip(np.searchsorted(known, wanted), 1, len(known) - 1)
    low, high = known[above - 1], known[above]
    down, up = wanted - low, high - wanted
    # codes rise with magnitudes, and so do their places here, from 0 on
    is_even = (above - 1 - np.searchsorted(known, 0)) % 2 == 0
    nearest = np.where((down < up) | ((down == up) & is_even), low, high)
    if storage == "bfloat16":
        nearest = np.where(np.abs(nearest) == 2.0**128, np.copysign(np.inf, nearest), nearest)
    return np.where(np.isnan(x), np.nan, nearest)


def interesting(storage: str) -> np.ndarray:
    """Every number, every middle of two, their float32 neighbours, and NaN: float32."""
    known = ladder(storage) if storage == "float8" else ladder(storage)[::257]
    middles = (known[1:] + known[:-1]) / 2
    ends = [0.0, -0.0, 1e-45, -1e-45, 448, 464, np.nextafter(np.float32(464), 1e9), 480, 3.4e38, -3.4e38]
    x = np.concatenate([known[np.abs(known) < 3.4e38], middles[np.abs(middles) < 3.4e38], ends]).astype(np.float32)
    beside = [np.nextafter(x, np.float32(end)) for end in (np.inf, -np.inf)]
    bits = np.array([0x7F800001, 0xFFC12345, 0x7FFFFFFF], np.uint32).view(np.float32)
    return np.concatenate([x, *beside, np.array([np.inf, -np.inf, np.nan], np.float32), bits])


def stored_by(run: Run, storage: str, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Let an operator store numbers as keys, and their negatives as values; return what it stored, in their order."""
    tokens = -(-len(numbers) // 256) * 16
    padded = np.resize(numbers, (1, tokens, 16)).astype(np.float32)
    attributes = ATTRIBUTES[storage]
    given = {**tokens_of(attributes, tokens, group=1), "key": padded, "value": -padded}
    fed = Fed(attributes, given, tokens // 16, run)
    fed.call(tokens)
    # keys are [page, channel, token] of 16 tokens
    keys = fed.state["keys"].reshape(-1, 16, 16).swapaxes(1, 2)
    return keys.reshape(-1)[: len(numbers)], fed.state["values"].reshape(-1)[: len(numbers)]


@EACH_STORAGE
def test_the_reference_rounds_by_the_definition(storage: str) -> None:
    x = interesting(storage)
    assert np.array_equal(to_storage(x, storage).astype(np.float64), by_definition(x, storage), equal_nan=True)


def test_float8_saturates() -> None:
    x = np.array([448, 464, 465, 1e9, np.inf, -449, -np.inf, np.nan], np.float32)
    expected = [448, 448, 448, 448, 448, -448, -448, np.nan]
    assert np.array_equal(to_storage(x, "float8").astype(np.float64), expected, equal_nan=True)
    assert ladder("float8")[-1] == LARGEST


def check_same_bits(run: Run, storage: str, numbers: np.ndarray) -> None:
    expected, found = (stored_by(each, storage, numbers) for each in (reference, run))
    for wanted, made in zip(expected, found, strict=True):
        assert made.dtype == FLOATS[storage]
        # equal numbers are equal bits, but for zero: onnxruntime's Where loses its sign, which the operator leaves open
        assert np.array_equal(wanted, made, equal_nan=True)


@needs_library
@EACH_STORAGE
def test_the_kernel_rounds_to_the_same_bits(native: Native, storage: str) -> None:
    check_same_bits(native, storage, interesting(storage))


@EACH_STORAGE
def test_the_body_rounds_to_the_same_bits(storage: str) -> None:
    check_same_bits(Body(), storage, interesting(storage))


BODY, KERNEL = Body(), Native()


@needs_library
@given(st.sampled_from(NARROW), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300), st.integers(0, 31))
@settings(max_examples=25, deadline=None)
def test_any_bits_are_rounded_alike(storage: str, words: list[int], cut: int) -> None:
    # words that end in zeros are the ties
    numbers = (np.array(words, np.uint32) >> np.uint32(cut) << np.uint32(cut)).view(np.float32)
    check_same_bits(BODY, storage, numbers)
    check_same_bits(KERNEL, storage, numbers)


@needs_library
@EACH_STORAGE
def test_the_kernel_reads_every_value_as_what_its_bits_say(native: Native, storage: str) -> None:
    # a query that reads itself alone has its value as y, but for what an exponential and a quotient of 1 are off
    codes = every_code(storage)
    tokens = len(codes) // 16
    attributes = attributes_of(kv_heads=1, storage=storage, policies=(1,), recent=1)
    state = attributes.state(1, tokens // 16, 16).zeros()
    state["values"] = pack_values(codes.reshape(tokens // 16, 16, 16), storage)[None, None]
    read = codes.astype(np.float32).reshape(tokens, 16)
    for position in range(0, tokens, max(1, tokens // 40)) if storage == "bfloat16" else range(tokens):
        last = {**tokens_of(attributes, 1, group=1), "value": read[None, None, position]}
        arrays = {**last, **state, "past": np.array([position]), "new": np.array([1])}
        y = native(*(arrays[name] for name in (*INPUTS, *STATE)), **attributes.for_node())[0]
        # infinity that weighs 1 may also be none
        finite = np.isfinite(read[position])
        assert np.array_equal(y[0, 0, finite], read[position][finite])
        assert not np.isfinite(y[0, 0, ~finite]).any()


@needs_library
@EACH_STORAGE
def test_the_kernel_reads_every_key_as_what_its_bits_say(native: Native, storage: str) -> None:
    # Each query head looks at one channel, and token t has a 1 in channel t of its value: y is the softmax of what the
    # 16 tokens have there. They are neighbours in size, so that a wrong code moves a weight by 2^-8 / 16 or more.
    known = ladder(storage)
    known = known[(np.abs(known) > 1e-30) & (np.abs(known) < 1e30)]
    for begin in range(0, len(known), 256) if storage == "float8" else range(0, len(known), len(known) // 20):
        page = np.resize(known[begin : begin + 256], 256).reshape(16, 16).T
        largest = np.abs(page).max(axis=0)
        attributes = attributes_of(kv_heads=1, storage=storage, scale=1.0)
        state = attributes.state(1, 1, 16).zeros()
        state["keys"][0, 0, 0] = pack_keys(page.astype(FLOATS[storage]), storage)
        state["values"][0, 0, 0] = pack_values(np.eye(16).astype(FLOATS[storage]), storage)
        query = np.diag(1 / largest).astype(np.float32)
        arrays = {**tokens_of(attributes, 1, group=16), **state, "past": np.array([15]), "new": np.array([1])}
        arrays |= {"query": query.reshape(1, 1, -1), "key": page[None, 15:].astype(np.float32)}
        arrays["value"] = np.eye(16, dtype=np.float32)[None, 15:]
        y = native(*(arrays[name] for name in (*INPUTS, *STATE)), **attributes.for_node())[0].reshape(16, 16)
        weights = np.exp((page * np.diag(query)).T)
        # weights of at most 1, rounded to float32 a few times: 2^-24 each; seen 1.2e-8
        assert np.abs(y - weights / weights.sum(axis=1, keepdims=True)).max() < 1e-7


@needs_library
@EACH_STORAGE
@pytest.mark.parametrize("name", ["keys", "values"])
def test_a_stored_code_that_is_no_number_makes_y_none(native: Native, storage: str, name: str) -> None:
    attributes = attributes_of(kv_heads=1, storage=storage)
    codes = every_code(storage)
    for code in codes[np.isnan(codes.astype(np.float32))][:: 1 if storage == "float8" else 25]:
        state = attributes.state(1, 1, 16).zeros()
        state[name].reshape(-1)[7 * 16 + 3] = code
        arrays = {**tokens_of(attributes, 1), **state, "past": np.array([9]), "new": np.array([1])}
        y = native(*(arrays[each] for each in (*INPUTS, *STATE)), **attributes.for_node())[0].reshape(2, 16)
        assert np.isnan(y).all() if name == "keys" else np.isnan(y[:, 3]).all()
