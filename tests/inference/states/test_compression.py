"""Pages of every storage of codes come back: to the bit, or within what a loss allows."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from graphopt.analysis.structure.paged_caches import PagedLayer
from graphopt.errors import InputError
from graphopt.inference.states import compression
from graphopt.inference.states.compression import Loss, Original, compress, decompress
from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes
from graphopt.runtime_ops.kv_attention.spec.layout import pack_keys, pack_values, unpack_values

Array = npt.NDArray[Any]
SIZE, PAGES, TOKENS = 32, 12, np.array([6 * 32 + 5, 11 * 32, 1])
"""Pages in use: 7, 11 and 1, of which the first and the two newest are floats."""

IN_CODES = ((0, range(1, 5)), (1, range(1, 9)), (2, range(0)))


def layer_with(number: int, storage: str, **attributes: Any) -> PagedLayer:
    kv = KVAttributes(2, 1.0, page=32, storage=storage, sink_pages=1, recent_pages=1, **attributes)
    return PagedLayer(number, SIZE, kv)


def random_states(layers: tuple[PagedLayer, ...]) -> dict[str, Array]:
    """Return states of pages whose codes follow one another slowly, in channels with levels of their own."""
    random, states = np.random.default_rng(len(layers)), {}
    for layer in layers:
        tensors = layer.states(3, PAGES)
        for name, tensor in tensors.items():
            states[layer.port(name)] = random.normal(size=tensor.shape).astype(tensor.dtype)
        kv = layer.attributes
        steps, middles = random.normal(size=(3, 2, PAGES, 32, SIZE)).cumsum(axis=3) / 15, random.normal(size=SIZE) / 8
        for name, storage, pack in (("keys", kv.stored, pack_keys), ("values", kv.stored_values, pack_values)):
            levels = storage.levels or 0
            codes = np.clip((0.5 + middles + steps) * levels, 0, levels).astype(np.uint8)
            if name == "keys" or kv.parts > 1:
                states[layer.port(name)] = pack(codes if name == "keys" else codes[..., ::-1], storage.name)
        scales = states[layer.port("scales")]
        scales[..., SIZE : 2 * SIZE] = np.exp(random.normal(size=(*scales.shape[:-1], SIZE)))
        scales[..., 2 * SIZE + 32 :] = np.exp(random.normal(size=scales[..., 2 * SIZE + 32 :].shape))
    return states


def through(states: dict[str, Array], layers: tuple[PagedLayer, ...], loss: str) -> tuple[dict[str, Array], int]:
    content, description = compress(states, layers, TOKENS, cast("Loss", loss))
    return decompress(content.__getitem__, description, TOKENS, {}), sum(len(part) for part in content.values())


def pages_of(array: Array) -> Array:
    """Return the pages that are read as codes, [pages, KV heads, ...]."""
    return np.concatenate([array[row, :, list(pages)] for row, pages in IN_CODES if len(pages)])


@pytest.mark.parametrize("storage", ["int8", "int6", "int4", "int3", "int2", "int1"])
@pytest.mark.parametrize("attributes", [{}, {"token_factors": 1}, {"value_size": 16}, {"value_storage": "int6"}])
def test_pages_of_codes_come_back(storage: str, attributes: dict[str, Any]) -> None:
    layers = (layer_with(0, storage, **attributes), layer_with(3, storage, **attributes))
    states = random_states(layers)
    result, size = through(states, layers, "none")
    assert list(result) == list(states)
    for name, array in states.items():
        assert result[name].dtype == array.dtype
        select = (lambda array: array) if name.endswith("recent") else pages_of
        assert select(result[name]).tobytes() == select(array).tobytes()
    # pages that are read as floats, or not at all, are left out
    assert size < sum(array.nbytes for name, array in states.items() if name.endswith("recent")) + sum(
        pages_of(array).nbytes for name, array in states.items() if not name.endswith("recent")
    )
    # a code of four bits behind one that is near it
    codes = sum(pages_of(states[layer.port("keys")]).nbytes for layer in layers)
    content, _ = compress(states, layers, TOKENS, "none")
    if storage == "int4":
        assert len(content["codes.0.keys.0"]) < 0.8 * codes


@pytest.mark.parametrize(("storage", "values"), [("int6", ""), ("int4", ""), ("int3", ""), ("int8", "int6")])
def test_what_is_lost_is_within_its_bounds(storage: str, values: str) -> None:
    layers = (layer_with(0, storage, token_factors=1, value_storage=values), layer_with(1, "float16"))
    states, kv = random_states(layers[:1]), layers[0].attributes
    states |= {
        layers[1].port(name): np.ones(tensor.shape, tensor.dtype) for name, tensor in layers[1].states(3, 4).items()
    }
    names = [layers[0].port(name) for name in ("keys", "values", "scales")]
    for loss in ("scales", "values"):
        result, _ = through(states, layers, loss)
        before, after = ([pages_of(tensors[name]) for name in names] for tensors in (states, result))
        before[2], after[2] = scales = [pages[2].astype(np.float64) for pages in (before, after)]
        assert np.array_equal(before[0], after[0])
        codes = [unpack_values(pages[1], 32, SIZE, kv.stored_values.name).astype(int) for pages in (before, after)]
        # the nearest multiple of 3 that is a code
        expected = (
            np.minimum((codes[0] + 1) // 3 * 3, (kv.value_levels or 0) // 3 * 3) if loss == "values" else codes[0]
        )
        assert np.array_equal(codes[1], expected)
        for first, second, levels in ((0, SIZE, kv.levels or 0), (2 * SIZE, 2 * SIZE + 32, kv.value_levels or 0)):
            low, step = (slice(first, second), slice(second, 2 * second - first))
            ends = [[pages[..., low], pages[..., low] + levels * pages[..., step]] for pages in scales]
            # half an 8th of a step, and half a 32nd of an octave at the ends; what comes back is rounded to float16
            bound = (1 / 16 + (2 ** (1 / 64) - 1) * levels / 2) * before[2][..., step] * 1.01
            bound = bound + 2.0**-11 * (np.abs(after[2][..., low]) + levels * after[2][..., step])
            assert all((np.abs(new - old) <= bound).all() for old, new in zip(*ends, strict=True))
        factors = [pages[2][..., 2 * SIZE + 64 :] for pages in (before, after)]
        assert np.array_equal(*factors)
        recent = layers[0].port("recent")
        assert np.allclose(result[recent], states[recent], rtol=2**-10, atol=1e-6)
        assert result[layers[1].port("keys")].dtype == np.float16


def test_scales_that_have_no_size_and_floats_out_of_range_stay_as_they_are() -> None:
    layers = (layer_with(0, "int4"),)
    states = random_states(layers)
    scales, recent = states[layers[0].port("scales")], states[layers[0].port("recent")]
    scales[1, 0, 3, SIZE] = 0  # a channel with one number throughout
    scales[1, 0, 4, 2 * SIZE + 1] = np.nan  # a value with a number that is not finite
    recent[0, 0, 0, 0] = 1e6
    result, _ = through(states, layers, "values")
    for name, array in ((layers[0].port("scales"), scales), (layers[0].port("recent"), recent)):
        select = (lambda array: array) if array is recent else pages_of
        assert select(result[name]).tobytes() == select(array).tobytes()


def test_a_loss_that_there_is_not_is_refused() -> None:
    with pytest.raises(InputError, match="the loss 'all': give one of none, scales, values"):
        through({}, (), "all")


@pytest.mark.parametrize("loss", ["none", "values"])
def test_pages_that_stayed_as_they_were_are_taken_over(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "GROUP_TOKENS", 64)
    layers = (layer_with(0, "int4", token_factors=1), layer_with(1, "int4", token_factors=1))
    states = random_states(layers)
    content, description = compress(states, layers, TOKENS, loss)
    states_again = decompress(content.__getitem__, description, TOKENS, {})
    # row 1 goes another way behind six pages, of which the last two were floats then; row 0 ends there
    lengths, tokens = np.array([6 * 32 + 5, 6 * 32, 1]), np.array([6 * 32 + 5, 12 * 32, 1])
    for name in ("keys", "values"):
        states_again[layers[1].port(name)][1, :, 5:] ^= 1
    names = list[str]()

    def get(name: str) -> Array:
        names.append(name)
        return content[name]

    original = Original(get, description, TOKENS, lengths)
    new_content, after = compress(states_again, layers, tokens, loss, original)
    # groups of two pages: those of pages 0 and 1, and of 2 and 3, are as they were
    assert {name.rsplit(".", 1)[-1] for name in names} == {"classes", "0", "1"}
    decoded_states = decompress(new_content.__getitem__, after, tokens, {})
    expected, new_description = compress(states_again, layers, tokens, loss)
    for name, array in decompress(expected.__getitem__, new_description, tokens, {}).items():
        assert array.tobytes() == decoded_states[name].tobytes()
    # of another loss nothing is
    names.clear()
    compress(states_again, layers, tokens, "scales", original)
    assert not names
