"""Caches that keep some of their tokens: the state beside one that was fed only those, and a decoder that goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import graphopt
from graphopt.analysis.structure.paged_caches import PagedLayer
from graphopt.errors import InputError
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.session import load
from graphopt.inference.states.eviction import SCORES, Eviction, check_layers, evict
from graphopt.runtime_ops.kv_attention.spec.append import append, row_of
from graphopt.runtime_ops.kv_attention.spec.attributes import LEVELS, STORAGES
from graphopt.runtime_ops.kv_attention.spec.readings import stored_tokens
from tests.graphs import relative
from tests.runtime_ops.kv_cases import Fed, attributes_of, tokens_of

COUNT, KEEP = 100, 41


def open_paged(source: Path, folder: Path) -> graphopt.Session:
    steps = [{"step": "canonicalize"}, {"step": "page_kv", "page": 16}]
    recipe = graphopt.Recipe.model_validate({"name": "pages", "steps": steps})
    graphopt.optimize(source, recipe, folder, run=False)
    return load(folder)


def stored_numbers(layer: PagedLayer, state: dict[str, np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values [KV heads, count, channels] as the only row is read."""
    kv = layer.attributes
    heads = [
        stored_tokens(kv, row_of(state, 0), head, np.arange(count), count, layer.head_size)
        for head in range(kv.kv_heads)
    ]
    keys, values = (np.stack([part.numbers.astype(np.float32) for part in parts]) for parts in zip(*heads, strict=True))
    return keys, values


@pytest.mark.parametrize("storage", ["int2", "int1"])
def test_what_a_clip_cut_off_is_not_cut_off_again(storage: str) -> None:
    kv, keep = attributes_of(storage=storage, clip=0.5, page=32), 70
    tokens = tokens_of(kv, COUNT, head_size=32)
    feed = Fed(kv, tokens, 4)
    feed.call(COUNT)
    layer, eviction = PagedLayer(0, 32, kv), Eviction(keep, sinks=5, recent=9)
    state = {name: feed.state[name] for name in layer.states(1, 4)}
    after = {**feed.state, **evict(layer, state, np.array([COUNT]), eviction, 3)}
    keys, values = stored_numbers(layer, feed.state, COUNT)
    index = eviction.tokens_that_stay(keys, values)[..., None]
    keys, values = (np.take_along_axis(numbers, index, 1) for numbers in (keys, values))
    new_keys, new_values = stored_numbers(layer, after, keep)
    # a step is rounded up to float16, by 2^-10 of it at most, and these are below 4
    assert np.abs(new_values - values).max() < 4e-3 * LEVELS[storage]
    by_token = [numbers.transpose(1, 0, 2)[None] for numbers in (keys, values)]
    zeros = kv.state(1, 3, 32).zeros()
    clipped_keys, _ = stored_numbers(layer, append(kv, zeros, *by_token, np.zeros(1, np.int64), np.full(1, keep)), keep)
    assert np.square(new_keys - keys).sum() < np.square(clipped_keys - keys).sum()


SAME_STORAGES = [(storage, "", factors) for storage in STORAGES for factors in (0, 1)]


@pytest.mark.parametrize(("storage", "values", "factors"), [*SAME_STORAGES, ("int8", "int6", 0), ("int4", "int2", 1)])
def test_the_state_is_that_of_the_tokens_that_stay(storage: str, values: str, factors: int) -> None:
    codes = storage.startswith("int")
    if factors and not codes:
        pytest.skip("floats have no factors")
    kv = attributes_of(storage=storage, value_storage=values, sink_pages=1, recent_pages=1, token_factors=factors)
    tokens = tokens_of(kv, COUNT, batch=2, head_size=32)
    pages = -(-COUNT // kv.page)
    feed = Fed(kv, tokens, pages)
    feed.call(COUNT)
    layer = PagedLayer(0, tokens["key"].shape[2] // kv.kv_heads, kv)
    state = {name: feed.state[name] for name in layer.states(2, pages)}
    eviction = Eviction(KEEP, sinks=5, recent=9)
    after = evict(layer, state, np.array([COUNT, COUNT]), eviction, -(-KEEP // kv.page))
    assert sum(array.nbytes for array in after.values()) < sum(array.nbytes for array in state.values())
    for row in range(2):
        numbers = []
        for head in range(kv.kv_heads):
            parts = stored_tokens(kv, row_of(feed.state, row), head, np.arange(COUNT), COUNT, layer.head_size)
            numbers.append([part.numbers.astype(np.float32) for part in parts])
        keys, values = (np.stack(part) for part in zip(*numbers, strict=True))
        index = eviction.tokens_that_stay(keys, values)
        assert (index[:, :5] == np.arange(5)).all()
        assert (index[:, -9:] == np.arange(COUNT - 9, COUNT)).all()
        assert index.shape == (kv.kv_heads, KEEP)
        keys, values = (
            np.take_along_axis(part, index[..., None], 1).transpose(1, 0, 2)[None] for part in (keys, values)
        )
        zeros = kv.state(1, -(-KEEP // kv.page), layer.head_size).zeros()
        expected = append(kv, zeros, keys, values, np.zeros(1, np.int64), np.full(1, KEEP))
        result = {**zeros, **{name: array[row : row + 1] for name, array in after.items()}}
        for head in range(kv.kv_heads):
            for left, right in zip(
                *(
                    stored_tokens(kv, row_of(state, 0), head, np.arange(KEEP), KEEP, layer.head_size)
                    for state in (expected, result)
                ),
                strict=True,
            ):
                assert np.array_equal(left.numbers, right.numbers)


@pytest.mark.parametrize("score", SCORES)
def test_the_best_of_each_head_stay(score: str) -> None:
    random = np.random.default_rng(0)
    keys, values = random.standard_normal((2, 2, 60, 16)).astype(np.float32)
    keys += 1
    # of head 0 token 30, and of head 1 token 20, is short and points the other way
    keys[0, 30], keys[1, 20] = -0.1, -0.1
    stay = Eviction(9, score=score, sinks=2, recent=6).tokens_that_stay(keys, values)
    assert stay.tolist() == [[0, 1, 30, *range(54, 60)], [0, 1, 20, *range(54, 60)]]


def test_a_decoder_goes_on_in_less_memory(llama_artifact: Path, tmp_path: Path) -> None:
    session = open_paged(llama_artifact, tmp_path / "made")
    ids = np.random.default_rng(0).integers(0, 300, (1, 110))
    whole, decoder = Decoder(session, 1), Decoder(session, 1)
    for text_decoder in (whole, decoder):
        text_decoder.step(ids)
    before = decoder.states.bytes
    eviction = Eviction(30, sinks=4, recent=20, slack=5)
    decoder.evict(eviction)
    assert decoder.states.bytes < before / 2
    assert decoder.tokens.tolist() == [30]
    # what comes has its own position
    (end,) = decoder._rows.begin(ids[:, :3], None).end.tolist()
    assert end == 113
    y = decoder.step(ids[:, :3])
    assert y.shape == whole.step(ids[:, :3]).shape
    decoder.rewind(30)
    assert np.array_equal(decoder.step(ids[:, :3]), y)
    assert np.array_equal(decoder.fork([0]).step(ids[:, 3:4]), decoder.step(ids[:, 3:4]))
    with pytest.raises(InputError, match="cannot go back to before that"):
        decoder.rewind(29)
    with pytest.raises(InputError, match="a file does not say which"):
        decoder.save(tmp_path / "cache")
    # one of 110 tokens, the one that the score likes least, is worth little
    all_but_one = Decoder(session, 1)
    all_but_one.step(ids)
    all_but_one.evict(Eviction(109, sinks=4, recent=20))
    expected, logits = whole.step(ids[:, 3:4]), all_but_one.step(ids[:, :3])
    del logits
    assert relative(expected, all_but_one.step(ids[:, 3:4])) < 0.1


def test_generate_evicts(llama_artifact: Path, tmp_path: Path) -> None:
    session = open_paged(llama_artifact, tmp_path / "made")
    prompt = np.random.default_rng(1).integers(0, 300, 100).tolist()
    plain = graphopt.generate(session, [prompt], max_new_tokens=12)
    roomy = graphopt.generate(session, [prompt], max_new_tokens=12, eviction=Eviction(320))
    assert roomy[0].tokens == plain[0].tokens
    fewer = graphopt.generate(session, [prompt], max_new_tokens=12, eviction=Eviction(40, "key-norm", 4, 16, 3))
    assert len(fewer[0].tokens) == 12
    assert fewer[0].tokens[0] == plain[0].tokens[0]  # it is of the whole prompt


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"policies": (1,)}, "it drops tokens by itself"),
        ({"window": 9}, "it drops tokens by itself"),
        ({"policies": (2,), "budget": 1}, "its pages have summaries"),
        ({"policies": (0, 1)}, "some of its heads stream"),
        ({"value_size": 16}, "its rows are latents"),
    ],
)
def test_caches_that_know_tokens_by_their_places_are_refused(attributes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_layers([PagedLayer(3, 16, attributes_of(**attributes))])


@pytest.mark.parametrize("options", [{"keep": 319}, {"keep": 400, "score": "best"}, {"keep": 400, "recent": 0}])
def test_an_eviction_that_cannot_be(options: dict[str, object]) -> None:
    with pytest.raises(InputError):
        Eviction(**options)  # type: ignore[arg-type]
