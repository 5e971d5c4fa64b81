from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.generation import generate
from graphopt.inference.session import Session, load
from graphopt.inference.states.buffers import HostBuffer
from graphopt.inference.states.device_memory import DeviceBuffer
from graphopt.inference.states.pages import PagedStates
from graphopt.passes.recipe import Recipe
from graphopt.quality.evaluation import evaluate
from graphopt.runtime_ops.kv_attention.spec.attributes import FLOATS
from graphopt.util.targets import Device
from tests.families import VOCABULARY

MakeArtifact = Callable[[str], Path]

# As in tests/passes/cache/test_page_kv.py.
FLOAT32 = 1e-5

PROMPTS = ["def f(x):", "import os, sys\nfor a in b:\n    print(a)", "x"]


@pytest.fixture(scope="module")
def make_session(make_artifact: MakeArtifact, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Session]:
    """Return a function that opens a family after a step of a recipe; each is made once."""
    folders: dict[str, Path] = {}

    def make(
        family: str, step: str = "page_kv", *, native: bool = True, device: Device = "cpu", **options: Any
    ) -> Session:
        key = f"{family} {step} {options}"
        if key not in folders:
            steps = [{"step": "canonicalize"}, {"step": step, **options}]
            folders[key] = tmp_path_factory.mktemp("paged") / "model"
            recipe = Recipe.model_validate({"name": step, "steps": steps})
            optimize(make_artifact(family), recipe, folders[key], quality_tokens=0)
        return load(folders[key], native=native, device=device)

    return make


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> Device:
    """What a session computes on."""
    if request.param == "cuda":
        request.getfixturevalue("interpreted_gpu")
    device_name: Device = request.param
    return device_name


def tokens(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (batch, length))


def close(expected: np.ndarray, result: np.ndarray) -> bool:
    return bool(np.abs(expected - result).max() < FLOAT32 * np.abs(expected).max())


@pytest.mark.parametrize("native", [True, False])
def test_the_same_tokens_as_with_caches_that_grow(
    native: bool, llama_artifact: Path, make_session: Callable[..., Session], device: Device
) -> None:
    before, after = load(llama_artifact), make_session("llama", page=16, native=native, device=device)
    texts = [generate(session, PROMPTS, max_new_tokens=40) for session in (before, after)]
    assert texts[0] == texts[1]
    ids = tokens(2, 30)
    assert close(before.logits(ids), after.logits(ids))
    text = "def f(x):\n    return x\n" * 12
    scores = [evaluate(session, text, window=48, stride=16).nats for session in (before, after)]
    # float32 rounding of a hundred tokens' likelihoods
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)


STREAMING = {"policy": "streaming", "sinks": 4, "recent": 24, "page": 16}
RETRIEVAL = {"policy": "retrieval", "sinks": 4, "recent": 16, "budget": 2, "page": 16}


@pytest.mark.parametrize(
    ("step", "options"),
    [
        ("quantize_kv", {"storage": "int8", "page": 16}),
        ("quantize_kv", {"storage": "int4", "page": 16}),
        ("sparse_kv", STREAMING),
        ("sparse_kv", RETRIEVAL),
        ("sparse_kv", RETRIEVAL | {"summary": "mean"}),
    ],
)
def test_the_same_tokens_without_the_library(
    step: str, options: dict[str, Any], make_session: Callable[..., Session]
) -> None:
    prompts = ["def f(x):\n    return g(x, [y for y in range(10)])\n" * 2, "x"]
    texts = [
        generate(make_session("llama", step, native=native, **options), prompts, max_new_tokens=36)
        for native in (True, False)
    ]
    assert texts[0] == texts[1]


def test_rows_that_ended_and_padding_cost_no_room(make_session: Callable[..., Session]) -> None:
    session = make_session("llama", page=16)
    decoder = Decoder(session, 2)
    ids = tokens(2, 12)
    mask = np.ones_like(ids)
    mask[0, :9] = 0
    decoder.step(ids, mask)
    assert decoder.tokens.tolist() == [3, 12]
    for _ in range(3):
        decoder.step(ids[:, :1], np.array([[0], [1]]))
    assert decoder.tokens.tolist() == [3, 15]
    assert decoder.length == 15
    # the row that waited continues unchanged
    single = Decoder(session, 1)
    single.step(ids[:1, 9:])
    assert close(single.step(ids[:1, :1])[0], decoder.step(ids[:, :1])[0])


def test_padding_behind_tokens_is_refused(make_session: Callable[..., Session]) -> None:
    session = make_session("llama", page=16)
    with pytest.raises(InputError, match="padding in front of a row's new tokens only"):
        Decoder(session, 1).step(tokens(1, 3), np.array([[1, 0, 1]]))


def test_a_row_past_the_positions_is_refused(make_session: Callable[..., Session]) -> None:
    decoder = Decoder(make_session("llama", page=16), 1)
    for _, _ in decoder.feed(tokens(1, 128)):
        pass
    with pytest.raises(InputError, match="129 tokens is longer than the model's 128 positions"):
        decoder.step(tokens(1, 1))
    assert decoder.tokens.tolist() == [128]


def test_the_cache_grows_by_doubling_and_reports_its_memory(
    make_session: Callable[..., Session], device: Device
) -> None:
    decoder = Decoder(make_session("llama", page=16, device=device), 1)
    capacities = []
    for _ in range(70):
        decoder.step(tokens(1, 1))
        capacities.append(decoder.states.capacity)
    assert sorted(set(capacities)) == [16, 32, 64, 128]
    assert decoder.states.pages == (8, 8)
    # 2 layers, keys and values, 2 heads of 16 numbers of 4 bytes, and a second set where a body cannot write in place
    sets = 1 if decoder.session.in_place else 2
    assert decoder.states.bytes == sets * 128 * 2 * 2 * 2 * 16 * 4
    buffers = [buffer for layer in decoder.states.tensors for state in layer.values() for buffer in state.buffers]
    assert {type(buffer) for buffer in buffers} == {DeviceBuffer if device == "cuda" else HostBuffer}


def test_room_for_what_is_expected_is_made_at_once(make_session: Callable[..., Session]) -> None:
    session = make_session("llama", page=16)
    decoder = Decoder(session, 1, room=90)
    assert decoder.states.capacity == 96
    decoder.step(tokens(1, 90))
    assert decoder.states.capacity == 96
    decoder.step(tokens(1, 7))  # more than was expected
    assert decoder.states.capacity == 128


def test_what_is_expected_is_no_more_than_a_wish(make_session: Callable[..., Session]) -> None:
    session = make_session("llama", page=16)
    sets = 1 if session.in_place else 2
    limit = sets * 48 * 256 * 2
    cache = PagedStates(session.interface, 1, in_place=session.in_place, memory_limit=limit, room=1000)
    assert cache.capacity == 16
    positions = PagedStates(session.interface, 1, in_place=session.in_place, max_tokens=40, room=1000)
    assert positions.capacity == 48


def test_generating_grows_no_cache(make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch) -> None:
    session, growths = make_session("llama", page=16), []
    grow = PagedStates._grow
    monkeypatch.setattr(PagedStates, "_grow", lambda *arguments: (growths.append(arguments), grow(*arguments)))
    generate(session, [[1] * 20, [2] * 3], max_new_tokens=50)
    assert len(growths) == 1


@pytest.mark.parametrize("step", ["page_kv", "canonicalize"])
def test_logits_stay_what_they_were_while_others_are_made(make_session: Callable[..., Session], step: str) -> None:
    decoder = Decoder(make_session("llama", step), 1)
    all_logits = [decoder.step(tokens(1, 3, seed)) for seed in range(4)]
    second = Decoder(make_session("llama", step), 1)
    for seed, logits in enumerate(all_logits):
        assert np.array_equal(logits, second.step(tokens(1, 3, seed)).copy())


def test_too_little_memory_is_said_before_it_runs_out(make_session: Callable[..., Session]) -> None:
    session = make_session("llama", page=16)
    sets = 1 if session.in_place else 2
    cache = PagedStates(session.interface, 1, in_place=session.in_place, memory_limit=sets * 48 * 256 * 2)
    decoder = Decoder(session, 1, states=cache)
    decoder.step(tokens(1, 30))
    # doubled to 64 tokens it would not fit, with the 48 that are needed it does
    decoder.step(tokens(1, 10))
    assert cache.capacity == 48
    before = cache.contents()["past_key_values.0.keys"].copy()
    with pytest.raises(InputError, match="49 tokens in each of 1 rows takes .*the limit is .*short"):
        decoder.step(tokens(1, 9))
    assert np.array_equal(cache.contents()["past_key_values.0.keys"], before)
    assert decoder.tokens.tolist() == [40]


def test_a_window_keeps_the_cache_from_growing(
    make_session: Callable[..., Session], device: Device, make_artifact: MakeArtifact
) -> None:
    session = make_session("mistral_window", page=16, device=device)
    ids = tokens(2, 120)
    decoder, whole = Decoder(session, 2), Decoder(load(make_artifact("mistral_window")), 2)
    expected = whole.step(ids)
    parts = [decoder.step(ids[:, :7]), *(decoder.step(ids[:, [column]]) for column in range(7, 120))]
    assert close(expected, np.concatenate(parts, axis=1))
    # window 6, calls of 7 and a page: two pages of 16
    assert decoder.states.pages == (2,)


def test_a_larger_call_moves_pages_that_have_gone_round(
    make_session: Callable[..., Session], device: Device, make_artifact: MakeArtifact
) -> None:
    session = make_session("mistral_window", page=16, device=device)
    ids = tokens(2, 120)
    decoder, whole = Decoder(session, 2), Decoder(load(make_artifact("mistral_window")), 2)
    mask = np.ones_like(ids)
    mask[1, :50] = 0  # rows stand at different places
    expected = whole.step(ids, mask)
    parts = [decoder.step(ids[:, begin : begin + 5], mask[:, begin : begin + 5]) for begin in range(0, 80, 5)]
    parts.append(decoder.step(ids[:, 80:], mask[:, 80:]))
    assert close(expected[mask == 1], np.concatenate(parts, axis=1)[mask == 1])


def test_rewound_it_goes_on_as_if_it_had_never_been_further(
    make_session: Callable[..., Session], device: Device
) -> None:
    session = make_session("llama", page=16, device=device)
    ids, next_ids = tokens(2, 60), tokens(2, 20, seed=1)
    decoder, straight = Decoder(session, 2), Decoder(session, 2)
    decoder.step(ids)
    decoder.rewind(np.array([37, 21]))
    assert decoder.tokens.tolist() == [37, 21]
    mask = np.ones((2, 37), np.int64)
    mask[1, :16] = 0
    padded_ids = np.where(mask, np.stack([ids[0, :37], np.roll(ids[1, :37], 16)]), 0)
    straight.step(padded_ids, mask)
    assert np.array_equal(straight.step(next_ids), decoder.step(next_ids))


@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_codes_can_be_rewound_within_the_pages_that_are_floats(
    storage: str, make_session: Callable[..., Session], device: Device
) -> None:
    session = make_session(
        "llama", "quantize_kv", storage=storage, page=16, sink_pages=0, recent_pages=1, device=device
    )
    ids, next_ids = tokens(1, 60), tokens(1, 20, seed=1)
    decoder, straight = Decoder(session, 1), Decoder(session, 1)
    straight.step(ids[:, :50])
    expected = straight.step(next_ids)
    decoder.step(ids)
    decoder.rewind(50)
    assert np.array_equal(expected, decoder.step(next_ids))
    # further back a page comes back from its codes: half a step of a range of a few numbers, through two layers
    decoder.rewind(50)
    decoder.rewind(20)
    decoder.step(ids[:, 20:50])
    result = decoder.step(next_ids)
    # (and what is rounded again mostly finds its old code)
    assert np.abs(expected - result).max() < {"int8": 0.03, "int4": 0.5}[storage] * np.abs(expected).max()


def test_what_cannot_be_rewound(make_session: Callable[..., Session]) -> None:
    decoder = Decoder(make_session("llama", page=16), 1)
    decoder.step(tokens(1, 10))
    with pytest.raises(InputError, match="row 0 has 10 tokens and cannot be rewound to 11"):
        decoder.rewind(11)


def test_a_cache_that_grows_can_be_rewound(llama_artifact: Path) -> None:
    session = load(llama_artifact, threads=1)
    ids, next_ids = tokens(2, 30), tokens(2, 5, seed=1)
    mask = np.ones_like(ids)
    mask[1, :12] = 0
    decoder, straight = Decoder(session, 2), Decoder(session, 2)
    decoder.step(ids, mask)
    with pytest.raises(InputError, match="row 0 has 30 tokens and cannot be rewound to 31"):
        decoder.rewind(np.array([31, 18]))
    for lengths in (np.array([20, 9]), 10):  # by different columns
        with pytest.raises(InputError, match=r"rows of a cache that grows.*page_kv"):
            decoder.rewind(lengths)
    decoder.rewind(np.array([25, 13]))
    assert decoder.tokens.tolist() == [25, 13]
    straight.step(ids[:, :25], mask[:, :25])
    assert close(straight.step(next_ids), decoder.step(next_ids))
    decoder = Decoder(session, 2)
    first = decoder.step(ids).copy()
    decoder.rewind(0)
    assert np.array_equal(decoder.step(ids), first)


def test_a_window_can_be_rewound_as_far_as_its_pages_are_there(
    make_session: Callable[..., Session], device: Device, make_artifact: MakeArtifact
) -> None:
    session = make_session("mistral_window", page=16, device=device)
    ids = tokens(1, 100)
    decoder = Decoder(session, 1)
    for column in range(100):
        decoder.step(ids[:, [column]])
    # 7 pages, of which the newest two are there: 80 to 111; a query at 85 reads the 5 tokens before it
    with pytest.raises(InputError, match="cannot be rewound from 100 to 84 .*rewind to 85 or more"):
        decoder.rewind(84)
    decoder.rewind(85)
    expected = Decoder(load(make_artifact("mistral_window")), 1).step(ids)[:, 85:]
    assert close(expected, np.concatenate([decoder.step(ids[:, [c]]) for c in range(85, 100)], axis=1))
    decoder.rewind(0)
    assert close(expected[:, -1:], decoder.step(ids)[:, -1:])


def test_a_prompt_is_shared_by_forking(make_session: Callable[..., Session], device: Device) -> None:
    session = make_session("llama", page=16, device=device)
    prompt, next_ids = tokens(2, 25), tokens(3, 9, seed=2)
    decoder = Decoder(session, 2)
    decoder.step(prompt)
    forks = decoder.fork([1, 1, 0])
    result = forks.step(next_ids)
    straight = Decoder(session, 3)
    straight.step(prompt[[1, 1, 0]])
    assert np.array_equal(straight.step(next_ids), result)
    # the one it came from is as it was
    assert decoder.tokens.tolist() == [25, 25]
    assert np.array_equal(decoder.step(next_ids[:1].repeat(2, 0))[1], result[0])
    with pytest.raises(InputError, match="batch of 2"):
        decoder.fork([2])


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("storage", ["bfloat16", "float8"])
def test_caches_of_types_that_numpy_has_not_are_rewound_forked_saved_and_restored(
    storage: str, native: bool, make_session: Callable[..., Session], device: Device, tmp_path: Path
) -> None:
    session = make_session("llama", "quantize_kv", native=native, storage=storage, page=16, device=device)
    ids, next_ids = tokens(2, 40), tokens(2, 9, seed=1)
    straight, decoder = Decoder(session, 2), Decoder(session, 2)
    straight.step(ids)
    expected = straight.step(next_ids)
    decoder.step(ids)
    decoder.step(next_ids[:, ::-1].copy())
    decoder.rewind(40)
    decoder.save(tmp_path / "cache.safetensors")
    copy = Decoder.restore(session, tmp_path / "cache.safetensors")
    assert {array.dtype.name for array in copy.states.contents().values()} == {FLOATS[storage].name}
    forks = decoder.fork([1, 0])
    assert np.array_equal(decoder.step(next_ids), expected)
    assert np.array_equal(copy.step(next_ids), expected)
    assert np.array_equal(forks.step(next_ids[::-1]), expected[::-1])
    # what a model says in one run without a cache of the caller
    assert close(
        straight.step(ids[:, :1])[:, -1], session.logits(np.concatenate([ids, next_ids, ids[:, :1]], 1))[:, -1]
    )
    content, name = (tmp_path / "cache.safetensors").read_bytes(), FLOATS[storage].name.encode()
    (tmp_path / "cache.safetensors").write_bytes(content.replace(name, b"?" * len(name)))
    with pytest.raises(InputError, match="has changed since it was written"):
        Decoder.restore(session, tmp_path / "cache.safetensors")


@pytest.mark.parametrize(("family", "step"), [("llama", "page_kv"), ("mistral_window", "page_kv")])
def test_a_cache_is_saved_and_restored(
    family: str, step: str, make_session: Callable[..., Session], device: Device, tmp_path: Path
) -> None:
    session = make_session(family, step, page=16, device=device)
    decoder = Decoder(session, 2)
    for begin in range(0, 50, 10):
        decoder.step(tokens(2, 50)[:, begin : begin + 10])
    decoder.save(tmp_path / "a" / "cache.safetensors")
    copy = Decoder.restore(session, tmp_path / "a" / "cache.safetensors")
    assert copy.length == 50
    next_ids = tokens(2, 20, seed=3)
    assert np.array_equal(decoder.step(next_ids), copy.step(next_ids))
    # only pages in use are stored: 4 of 8
    assert (tmp_path / "a" / "cache.safetensors").stat().st_size < 2 * 4 * 16 * 2 * 2 * 2 * 16 * 4 + 3000


def test_a_cache_file_that_is_wrong_is_refused(make_session: Callable[..., Session], tmp_path: Path) -> None:
    session = make_session("llama", page=16)
    decoder, file = Decoder(session, 1), tmp_path / "cache.safetensors"
    decoder.step(tokens(1, 20))
    decoder.save(file)
    content = file.read_bytes()
    with pytest.raises(InputError, match="the cache is of another model"):
        Decoder.restore(make_session("mistral_window", page=16), file)
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match="has changed since it was written"):
        Decoder.restore(session, file)
    file.write_bytes(content.replace(b"[20]", b"[19]"))
    with pytest.raises(InputError, match="has changed since it was written"):
        Decoder.restore(session, file)
    file.write_bytes(content[:-9])
    with pytest.raises(InputError, match="cannot be read"):
        Decoder.restore(session, file)
    with pytest.raises(InputError, match="no cache file here"):
        Decoder.restore(session, tmp_path / "other")
