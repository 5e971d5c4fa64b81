"""Prompts of different length: fed one after the other they leave the cache that padding would leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.compile.pipeline import optimize
from graphopt.inference.decoding import decoder as decoding
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.decoding.unpadded_prefill import is_faster_unpadded
from graphopt.inference.generation import generate
from graphopt.inference.session import Session, load
from graphopt.passes.recipe import load_recipe
from tests.families import VOCABULARY
from tests.native import needs_library
from tests.paged_artifacts import paged_artifact, with_caches

pytestmark = needs_library

STATES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "dense": ("float32", None),
    "int8": ("int8", None),
    "rings": ("int4", {"policy": "streaming", "sinks": 5, "recent": 20}),
    "retrieval": ("float16", {"policy": "retrieval", "sinks": 3, "recent": 16, "budget": 1}),
}


@pytest.fixture(scope="module")
def sessions(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Session]:
    """Return a small Llama with products of ours and each kind of cache."""
    folder = paged_artifact(llama_artifact, tmp_path_factory.mktemp("apart"), "fp6-rtn")
    return {name: with_caches(folder, *states) for name, states in STATES.items()}


@pytest.fixture
def set_unpadded(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return a function that says whether prompts go apart."""
    return lambda yes: monkeypatch.setattr(decoding, "is_faster_unpadded", lambda mask: yes)


def padded_batch(counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (len(counts), max(counts)))
    mask = (np.arange(max(counts)) >= max(counts) - np.array(counts)[:, None]).astype(np.int64)
    return ids, mask


@pytest.mark.parametrize("name", STATES)
def test_the_cache_and_the_logits_are_those_of_padding_to_the_bit(
    sessions: dict[str, Session], set_unpadded: Callable[[bool], None], name: str
) -> None:
    ids, mask = padded_batch([70, 3, 41, 16])
    decoders = []
    for yes in (False, True):
        set_unpadded(yes)
        decoder = Decoder(sessions[name], 4)
        logits = [logits[:, -1:].copy() for _, logits in decoder.feed(ids, mask)][-1]
        decoders.append((decoder, logits))
    (side, first), (unpadded_decoder, second) = decoders
    assert unpadded_decoder.tokens.tolist() == side.tokens.tolist() == [70, 3, 41, 16]
    assert unpadded_decoder.length == side.length == 70
    assert np.array_equal(first, second)
    for _ in range(30):
        step = np.full((4, 1), 7)
        assert np.array_equal(side.step(step), unpadded_decoder.step(step))


def test_hidden_states_are_those_of_padding_too(
    llama_artifact: Path, tmp_path: Path, set_unpadded: Callable[[bool], None]
) -> None:
    recipe = load_recipe("fp6-rtn", add=["expose_hidden"]).with_lower("ort-cpu:avx512")
    optimize(llama_artifact, recipe, tmp_path / "made", quality_tokens=0)
    session, (ids, mask), hidden_states = load(tmp_path / "made", threads=1), padded_batch([70, 3, 41]), []
    for yes in (False, True):
        set_unpadded(yes)
        decoder = Decoder(session, 3)
        for _ in decoder.feed(ids, mask):
            pass
        assert decoder.hidden is not None
        hidden_states.append(decoder.hidden[:, -1:].copy())
    assert hidden_states[1].shape[:2] == (3, 1)
    assert np.array_equal(*hidden_states)


@settings(max_examples=15)
@given(counts=st.lists(st.integers(1, 60), min_size=2, max_size=5), name=st.sampled_from(sorted(STATES)))
def test_texts_are_the_same(sessions: dict[str, Session], counts: list[int], name: str) -> None:
    ids, mask = padded_batch(counts)
    prompts = [row[keep.astype(bool)].tolist() for row, keep in zip(ids, mask, strict=True)]
    texts = []
    for yes in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoding, "is_faster_unpadded", lambda mask, yes=yes: yes)
            texts.append([completion.tokens for completion in generate(sessions[name], prompts, max_new_tokens=8)])
    assert texts[0] == texts[1]


def test_a_caller_that_stops_finds_what_rows_were_fed(
    sessions: dict[str, Session], set_unpadded: Callable[[bool], None]
) -> None:
    set_unpadded(True)
    ids, mask = padded_batch([20, 5, 9])
    decoder = Decoder(sessions["dense"], 3)
    for number, _ in enumerate(decoder.feed(ids, mask)):
        assert decoder.tokens.tolist() == [[20, 0, 0], [20, 5, 0], [20, 5, 9]][number]
    assert number == 2
    # An empty row takes no step.
    decoder = Decoder(sessions["dense"], 2)
    mask[0] = 0
    assert len(list(decoder.feed(ids[:2], mask[:2]))) == 1
    assert decoder.tokens.tolist() == [0, 5]


@pytest.mark.parametrize(
    ("counts", "pays"),
    [([1000, 100], True), ([1000, 950], False), ([36, 5, 5], False), ([100, 5, 5], True), ([9], False)],
)
def test_prompts_go_apart_where_padding_would_cost_more(counts: list[int], pays: bool) -> None:
    """A prompt of 5 counts as 32, as a step of few rows costs hardly less."""
    assert is_faster_unpadded(padded_batch(counts)[1]) is pays
