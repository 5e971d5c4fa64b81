from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.errors import InputError
from graphopt.runtime_ops.kv_attention.spec.attributes import PAGES
from graphopt.runtime_ops.paged_attention.spec.layout import (
    STORAGES,
    first_with_residual,
    head_size,
    pack,
    pack_latents,
    residual_slots,
    restore_tokens,
    store_tokens,
    unpack,
    unpack_latents,
    width,
)
from graphopt.runtime_ops.paged_attention.spec.op import PAGED_ATTENTION, reference
from tests.runtime_ops.hostile import Case, Tensor
from tests.runtime_ops.paged_attention.honest import honest, latents, pools
from tests.runtime_ops.test_registry import run_body

Arrays = dict[str, np.ndarray]

SIZES = {"kv_heads": 2, "window": 0, "scale": 0.25, "softcap": 0.0, "storage": "float32"}


def arrays(case: Case) -> list[np.ndarray]:
    return [tensor.values for tensor in case.inputs.values()]


def requests(new: list[int], past: list[int], table: list[list[int]], blocks: int = 8) -> Arrays:
    """Random numbers for requests over blocks of 16 tokens, 2 KV heads of 16 numbers, 4 query heads."""
    random, tokens = np.random.default_rng(0), sum(new)
    normal = random.standard_normal
    return {
        "query": normal((tokens, 64)).astype(np.float32),
        "key": normal((tokens, 32)).astype(np.float32),
        "value": normal((tokens, 32)).astype(np.float32),
        "starts": np.cumsum([0, *new]).astype(np.int32),
        "past": np.array(past, np.int32),
        "block_table": np.array(table, np.int32),
        "sink_logits": np.zeros(0, np.float32),
        **pools(normal((2, blocks, 2, 16, 16)), "float32"),
    }


ROUNDED = {**SIZES, "storage": "int4", "residuals": 1}


def rounded_requests(new: list[int], past: list[int], table: list[list[int]]) -> Arrays:
    """Random numbers for requests over blocks of 16 tokens of int4, 2 KV heads of 32 numbers, 4 query heads."""
    random, tokens = np.random.default_rng(0), sum(new)
    normal = random.standard_normal
    return {
        "query": normal((tokens, 128)).astype(np.float32),
        "key": normal((tokens, 64)).astype(np.float32),
        "value": normal((tokens, 64)).astype(np.float32),
        "starts": np.cumsum([0, *new]).astype(np.int32),
        "past": np.array(past, np.int32),
        "block_table": np.array(table, np.int32),
        "sink_logits": np.zeros(0, np.float32),
        **pools(normal((2, 8, 2, 16, 32)), "int4"),
    }


def put(inputs: Arrays, name: str, block: int, slots: slice, number: float, head: int = 0, channel: int = 0) -> None:
    """Change a number of a token in float32 blocks."""
    held = unpack(inputs[name], "float32", are_keys=name == "keys").copy()
    held[block, head, slots, channel] = number
    inputs[name] = pack(held, "float32", are_keys=name == "keys")


def by_body(inputs: Arrays, **attributes: Any) -> list[np.ndarray]:
    fed = {name: Tensor(array, "fed") for name, array in inputs.items()}
    return run_body(Case("PagedAttention", fed, {**SIZES, **attributes}))


@given(honest())
@settings(max_examples=12, deadline=None)
def test_the_body_is_the_reference(case: Case) -> None:
    y, *after = reference(*arrays(case), **case.attributes)
    found, *stored = run_body(case)
    # what is stored is rounded once, as NumPy rounds; y: sums of up to 50 products of normal numbers in float32, of
    # queries that may be float16, whose last bit is 1e-3 of numbers up to 4
    for expected, made in zip(after, stored, strict=True):
        np.testing.assert_array_equal(expected, made)
    np.testing.assert_allclose(found.astype(np.float64), y, atol=4e-3 if found.dtype == np.float16 else 2e-5)


def test_requests_together_are_requests_alone() -> None:
    table = [[5, 1, -1], [0, 7, 3]]
    inputs = requests([3, 6], [14, 29], table)
    y, keys, values, *_ = reference(*inputs.values(), **SIZES)
    for row, tokens in ((0, slice(0, 3)), (1, slice(3, 9))):
        alone = {name: inputs[name][tokens] for name in ("query", "key", "value")}
        alone |= {"starts": np.array([0, tokens.stop - tokens.start], np.int32), "past": inputs["past"][row : row + 1]}
        alone = {**inputs, **alone, "block_table": inputs["block_table"][row : row + 1]}
        found, after, *_ = reference(*alone.values(), **SIZES)
        np.testing.assert_array_equal(found, y[tokens])
        used = [block for block in table[row] if block >= 0]
        np.testing.assert_array_equal(after[used], keys[used])
    # blocks that no request names stay
    np.testing.assert_array_equal(values[[2, 4, 6]], inputs["values"][[2, 4, 6]])


@pytest.mark.parametrize("reach", [{"window": 6}, {"window": 6, "chunks": 1}])
def test_a_prompt_in_pieces_is_a_prompt_at_once(reach: dict[str, int]) -> None:
    whole, attributes = requests([40], [0], [[5, 1, 2]]), {**SIZES, **reach, "softcap": 3.0}
    expected, *after = reference(*whole.values(), **attributes)
    state, found = [whole["keys"], whole["values"]], []
    for begin, end in ((0, 12), (12, 13), (13, 40)):
        piece = {name: whole[name][begin:end] for name in ("query", "key", "value")}
        piece |= {"starts": np.array([0, end - begin], np.int32), "past": np.array([begin], np.int32)}
        piece |= {"keys": state[0], "values": state[1]}
        y, *state = reference(*{**whole, **piece}.values(), **attributes)
        found.append(y)
    # the same sums in float64
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-12)
    np.testing.assert_array_equal(state[:2], after[:2])


@pytest.mark.parametrize("page", PAGES)
def test_residuals_lie_in_slots_without_a_token(page: int) -> None:
    """Filled token by token, a block holds the residuals of as many of its newest tokens as it has free slots."""
    places, held = residual_slots(page), {}
    for count in range(1, page + 1):
        held.pop(count - 1, None)  # the new token takes its slot
        if count < page:
            held[int(places[count - 1])] = count - 1
        kept = range(max(0, first_with_residual(count, page)), count)
        assert len(kept) == min(count, page - count)
        assert all(held[int(places[token])] == token and places[token] >= count for token in kept)


@pytest.mark.parametrize("window", [0, 6])
def test_residuals_hang_on_positions_alone(window: int) -> None:
    """A prompt in pieces leaves the bytes of one at once, and reads the same; full blocks have first codes alone."""
    whole, attributes = rounded_requests([40], [0], [[5, 1, 2]]), {**ROUNDED, "window": window}
    expected, *after = reference(*whole.values(), **attributes)
    names, found = ("keys", "values", "key_scales", "value_scales"), []
    state = [whole[name] for name in names]
    for begin, end in ((0, 12), (12, 13), (13, 15), (15, 40)):
        piece = {name: whole[name][begin:end] for name in ("query", "key", "value")}
        piece |= {"starts": np.array([0, end - begin], np.int32), "past": np.array([begin], np.int32)}
        piece |= dict(zip(names, state, strict=True))
        y, *state = reference(*{**whole, **piece}.values(), **attributes)
        found.append(y)
    # the same sums in float64
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-12)
    without, *plain = reference(*whole.values(), **{**attributes, "residuals": 0})
    for made, again, first in zip(after, state, plain, strict=True):
        np.testing.assert_array_equal(made, again)
        np.testing.assert_array_equal(made[[5, 1]], first[[5, 1]])
    # the last token of a block reads first codes alone, and others do not
    assert np.abs(expected - without).max(1)[[15, 31]].max() == 0
    assert np.abs(expected - without).max(1)[[0, 14, 16, 39]].min() > 1e-4


def test_both_codes_are_nearer_to_what_was_stored() -> None:
    """8 tokens of a block of 16 all have residuals: by both codes they err by a fifteenth of what one errs by."""
    inputs = rounded_requests([8], [0], [[5]])
    floats = {name: inputs[name].astype(np.float64) for name in ("query", "key", "value")}
    exact = np.empty((8, 2, 2, 32))
    q, K, V = (floats[name].reshape(8, 2, -1, 32) for name in ("query", "key", "value"))
    for token in range(8):
        scores = np.einsum("hgd,nhxd->hgn", q[token], K[: token + 1]) * 0.25
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        exact[token] = np.einsum("hgn,nhxd->hgd", weights, V[: token + 1])
    errors = [
        np.abs(reference(*inputs.values(), **{**ROUNDED, "residuals": residuals})[0] - exact.reshape(8, -1)).max()
        for residuals in (0, 1)
    ]
    # the second code has the largest of 32 uniform errors of one step for its span, 15 steps
    assert errors[1] < errors[0] / 8


def test_a_chunk_is_a_prompt_of_its_own() -> None:
    """The second chunk, of 6 tokens, sees what it would see without a past; the body says the same."""
    whole, attributes = requests([12], [0], [[5]]), {**SIZES, "window": 6, "chunks": 1}
    expected, *_ = reference(*whole.values(), **attributes)
    second = {name: whole[name][6:] for name in ("query", "key", "value")}
    alone, *_ = reference(*{**whole, **second, "starts": np.array([0, 6], np.int32)}.values(), **SIZES)
    np.testing.assert_allclose(expected[6:], alone, rtol=1e-12)
    # sums of 64 products of normal numbers in float32, and of at most 6 weights
    assert np.abs(by_body(whole, window=6, chunks=1)[0] - expected).max() < 1e-5
    with pytest.raises(ValueError, match="chunks is 0, or 1 with a window above 0; they are 1 and 0"):
        reference(*whole.values(), **{**SIZES, "chunks": 1})


def test_slopes_are_a_bias_by_distance() -> None:
    """A query scores so much more for each token that a key is nearer: as a channel of keys that counts tokens."""
    whole, slopes = requests([12], [0], [[5]]), [0.5, 0.125, 0.0, -0.25]
    expected, *_ = reference(*whole.values(), **SIZES, slopes=slopes)
    query, key = (whole[name].reshape(12, heads, 16).copy() for name, heads in (("query", 4), ("key", 2)))
    without, other_key = query.copy(), key.copy()
    query[..., 0], key[..., 0] = 0, 0
    without[..., 0], other_key[..., 0] = 4 * np.float32(slopes), np.arange(12)[:, None]  # 4 times the scale of 1/4
    flat = {"query": query.reshape(12, 64), "key": key.reshape(12, 32)}
    found, *_ = reference(*{**whole, **flat}.values(), **SIZES, slopes=slopes)
    counted = {"query": without.reshape(12, 64), "key": other_key.reshape(12, 32)}
    channel, *_ = reference(*{**whole, **counted}.values(), **SIZES)
    # the same sums in float64: biases of a query differ by one number for all keys, which no softmax sees
    np.testing.assert_allclose(found, channel, rtol=1e-9, atol=1e-12)
    assert np.abs(found - expected).max() > 0.1
    # sums of 64 products of normal numbers in float32, and of at most 12 weights
    assert np.abs(by_body(whole, slopes=slopes)[0] - expected).max() < 1e-5
    for wrong in ({"slopes": slopes[:3]}, {"slopes": slopes, "softcap": 2.0}):
        with pytest.raises(ValueError, match="slopes are finite, one for each of 4 query heads"):
            reference(*whole.values(), **{**SIZES, **wrong})


def test_a_shared_prefix_is_read_by_both() -> None:
    inputs = requests([1, 1], [16, 16], [[3, 1], [3, 2]])
    inputs["query"][1], inputs["key"][1], inputs["value"][1] = (inputs[n][0] for n in ("query", "key", "value"))
    y, *_ = reference(*inputs.values(), **SIZES)
    np.testing.assert_array_equal(y[0], y[1])


LIES: list[tuple[dict[str, Any], str]] = [
    ({"starts": [1, 3, 5]}, "starts rises from 0 to 5"),
    ({"starts": [0, 3, 6]}, "starts rises from 0 to 5"),
    ({"starts": [0, 3, 4]}, "starts rises from 0 to 5"),
    ({"starts": [0, 7, 5]}, "starts rises from 0 to 5"),
    ({"past": [-1, 3]}, "past is at least 0"),
    ({"past": [14, 2**31 - 1]}, "request 1 has 2147483649 tokens and 3 blocks of 16"),
    ({"past": [14, 47]}, "request 1 has 49 tokens and 3 blocks of 16"),
    ({"block_table": [[5, -1, -1], [0, 7, 3]]}, "request 0 needs block -1 of 8"),
    ({"block_table": [[5, 8, -1], [0, 7, 3]]}, "request 0 needs block 8 of 8"),
    ({"block_table": [[-(2**31), 1, -1], [0, 7, 3]]}, "needs block -2147483648"),
    ({"block_table": [[5, 7, -1], [0, 7, 3]]}, "a block is written for two requests"),
    ({"block_table": [[5, 5, -1], [0, 7, 3]]}, "a block is written for two requests, or twice for one"),
]


@pytest.mark.parametrize(("lie", "message"), LIES, ids=lambda value: value if isinstance(value, str) else "")
def test_lies_are_errors_of_reference_and_body(lie: dict[str, Any], message: str) -> None:
    # request 0 has positions 14 to 16, request 1 positions 15 and 16
    inputs = requests([3, 2], [14, 15], [[5, 1, -1], [0, 7, -1]])
    by_body(inputs)
    inputs |= {name: np.array(numbers, np.int32) for name, numbers in lie.items()}
    with pytest.raises(ValueError, match=message):
        reference(*inputs.values(), **SIZES)
    with pytest.raises(Exception, match="Gather"):
        by_body(inputs)


def spoil(inputs: Arrays, odd: float) -> None:
    """Put a number into what the requests of the test below read, and into slots that nobody reads."""
    put(inputs, "keys", 5, slice(2, 3), odd, channel=3)  # position 2 of request 0
    put(inputs, "values", 0, slice(1, 2), odd, head=1, channel=6)  # position 1 of request 1
    put(inputs, "keys", 1, slice(3, None), odd)
    put(inputs, "values", 7, slice(2, None), odd)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_reach_those_that_read_them(odd: float) -> None:
    inputs = requests([2, 1], [17, 16], [[5, 1], [0, 7]])
    spoil(inputs, odd)
    y, *_ = reference(*inputs.values(), **SIZES)
    lost = np.isnan(y.reshape(3, 2, 2, 16))
    assert lost[:2, 0].all()
    assert not lost[:2, 1].any()
    assert lost[2, 1, :, 6].all()
    assert lost.sum() == 2 * 2 * 16 + 2
    found, *_ = by_body(inputs)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(y))
    windowed, *_ = reference(*inputs.values(), **{**SIZES, "window": 3})
    assert not np.isnan(windowed).any()
    assert not np.isnan(by_body(inputs, window=3)[0]).any()


@pytest.mark.parametrize(
    "name", ["version1", "version1_latent", "version1_int6", "version1_choice", "version1_residuals"]
)
def test_frozen_vectors_keep_their_meaning(name: str) -> None:
    """Never regenerate the files: a change that they do not survive is a new version of the operator."""
    file = files("graphopt.runtime_ops").joinpath("paged_attention", "vectors", f"{name}.json")
    for frozen in json.loads(file.read_text()):
        inputs = {
            name: np.array(each["numbers"], each["type"]).reshape(each["shape"])
            for name, each in frozen["inputs"].items()
        }
        y, *after = reference(*inputs.values(), **frozen["attributes"])
        # y is frozen with 9 digits
        np.testing.assert_allclose(y.ravel(), frozen["y"], atol=1e-8)
        for made, name in zip(after, ("keys", "values", "key_scales", "value_scales"), strict=True):
            np.testing.assert_array_equal(made.ravel(), np.array(frozen[name], made.dtype))
        found, *held = by_body(inputs, **frozen["attributes"])
        np.testing.assert_allclose(found.ravel(), frozen["y"], atol=2e-6)
        for made, expected in zip(held, after, strict=True):
            np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize("storage", STORAGES)
@given(
    seed=st.integers(0, 2**32 - 1), heads=st.integers(1, 3), lines=st.integers(1, 2), size=st.sampled_from([64, 192])
)
@settings(max_examples=10, deadline=None)
def test_blocks_hold_each_token_by_itself(storage: str, seed: int, heads: int, lines: int, size: int) -> None:
    random = np.random.default_rng(seed)
    numbers = random.standard_normal((2, heads, 16 * lines, size)).astype(np.float32)
    held, scales = store_tokens(numbers, storage)
    for are_keys in (True, False):
        blocks = pack(held, storage, are_keys=are_keys)
        assert blocks.shape == (2, 16 * lines, heads, width(size, storage))
        assert head_size(blocks.shape[-1], storage) == size
        np.testing.assert_array_equal(unpack(blocks, storage, are_keys=are_keys), held)
        # a token's bytes are its own: another token changes none of them
        other = held.copy()
        other[0, 0, 3] = 0
        changed = pack(other, storage, are_keys=are_keys) != blocks
        assert changed.sum() <= width(size, storage)
        assert not changed[1].any()
        assert not changed.reshape(2, heads, -1)[:, 1:].any()
    error = np.abs(restore_tokens(held, scales, storage) - numbers)
    if scales is not None:
        # half a step, and what float32 rounds on the way
        assert (error <= scales[..., None] * 0.5001).all()
        assert scales.shape == (2, heads, 16 * lines)


def test_tokens_without_a_scale() -> None:
    tokens = np.array([[0.0] * 32, [1e-38] * 32, [np.inf] + [1.0] * 31, [np.nan] * 32, [3e38] * 32], np.float32)
    codes, scales = store_tokens(tokens, "int4")
    assert scales is not None
    np.testing.assert_array_equal(scales[:2], 0)
    assert np.isnan(scales[2:]).all()
    assert not codes.any()


def test_cost() -> None:
    cost = PAGED_ATTENTION.cost(
        [(5, 32), (5, 16), (5, 16), (3,), (2,), (2, 3), (0,), (8, 4, 2, 8), (8, 4, 2, 8), (0,), (0,)]
    )
    assert cost.operations == 4 * 5 * 32 * 12
    # query and y, new keys and values given and stored, 12 tokens of 2 requests
    assert cost.bytes == 4 * (2 * 160 + 4 * 80 + 2 * 2 * 12 * 16) + 4 * 5


def latent_requests() -> Arrays:
    """Two requests over blocks of 32 latents of 32 numbers, of which values are 16; 2 query heads."""
    inputs, random = requests([3, 2], [14, 37], [[5, -1], [0, 7]]), np.random.default_rng(1)
    inputs |= latents(random.standard_normal((8, 1, 32, 32)), "float32")
    inputs |= {"value": np.zeros(0, np.float32), "feedback": np.zeros(0, np.float16)}
    chosen = [[0, 3, 14, -1], [15, -1, -1, -1], [1, 2, 9, 16], [37, -1, -1, -1], [0, 31, 32, 38]]
    return inputs | {"choice": np.array(chosen, np.int32)}


LATENT: dict[str, Any] = {**SIZES, "kv_heads": 1, "value_size": 16}


def test_a_token_reads_what_it_chooses_and_nothing_else() -> None:
    """All positions that a token sees are what it reads without a choice; others may hold anything."""
    inputs = latent_requests()
    positions = [14, 15, 16, 37, 38]
    dense = {name: array for name, array in inputs.items() if name not in ("feedback", "choice")}
    everything = np.array([[*range(p + 1), *[-1] * (38 - p)] for p in positions], np.int32)
    y, *after = reference(*dense.values(), **LATENT)
    found, *stored = reference(*{**inputs, "choice": everything}.values(), **LATENT, chooses=1)
    np.testing.assert_allclose(found, y, rtol=1e-12)
    np.testing.assert_array_equal(stored[0], after[0])
    y, *_ = reference(*inputs.values(), **LATENT, chooses=1)
    held = unpack_latents(inputs["keys"], inputs["values"], "float32").copy()
    held[5, 0, [4, 5, 8]] = np.nan  # positions that no token of request 0 chooses
    held[0, 0, 30] = np.nan  # and none of request 1
    keys, values = pack_latents(held, "float32")
    spoiled = {**inputs, "keys": keys, "values": values}
    np.testing.assert_array_equal(reference(*spoiled.values(), **LATENT, chooses=1)[0], y)
    # sums of 32 products of normal numbers in float32, of at most 4 weights
    np.testing.assert_allclose(by_body(spoiled, **LATENT, chooses=1)[0], y, atol=1e-5)


CHOICES: list[list[int]] = [[3, 3, 14, -1], [3, 0, -1, -1], [0, 15, -1, -1], [-1, -1, -1, -1], [-2, 3, -1, -1]]
"""What the token at position 14 may not choose."""
CHOICES += [[0, -1, 3, -1]]


@pytest.mark.parametrize("wrong", CHOICES, ids=str)
def test_wrong_choices_are_errors_of_reference_and_body(wrong: list[int]) -> None:
    inputs = latent_requests()
    by_body(inputs, **LATENT, chooses=1)
    inputs["choice"][0] = wrong
    with pytest.raises(ValueError, match="token 0 chooses positions that rise from 0 to 14 at most"):
        reference(*inputs.values(), **LATENT, chooses=1)
    with pytest.raises(Exception, match="Gather"):
        by_body(inputs, **LATENT, chooses=1)


def test_a_choice_is_one_of_latents_without_a_window() -> None:
    inputs = latent_requests()
    for other in ({"window": 5}, {"value_size": 0}):
        with pytest.raises(ValueError, match="chooses is 0, or 1 with a value_size and no window"):
            reference(*inputs.values(), **{**LATENT, **other}, chooses=1)
        with pytest.raises(InputError, match="chooses is 0, or 1 with a value_size and no window"):
            by_body(inputs, **{**LATENT, **other}, chooses=1)
