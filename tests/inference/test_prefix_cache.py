"""Prompts that begin like an earlier one feed only the rest, where states grow and where they are recurrent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from graphopt.inference.decoding import decoder as decoding
from graphopt.inference.generation import generate, stream
from graphopt.inference.prefix_cache import PrefixCache
from graphopt.inference.session import Session, load

DOCUMENT = np.random.default_rng(5).integers(0, 300, 40).tolist()


@pytest.fixture(scope="module", params=["llama", "qwen3_next"])
def session(request: pytest.FixtureRequest, make_artifact: Callable[[str], Path]) -> Session:
    return load(make_artifact(request.param), threads=1)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_PIECE", 8)


def test_a_prompt_that_shares_a_document_feeds_the_rest(session: Session) -> None:
    cache = PrefixCache(session)
    questions = [[*DOCUMENT, *end] for end in ([7, 8, 9], [11, 12], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16])]
    fed_counts = []
    for question in questions:
        (with_cache,) = generate(session, [question], max_new_tokens=6, cache=cache)
        (plain,) = generate(session, [question], max_new_tokens=6)
        assert with_cache.tokens == plain.tokens
        fed_counts.append(cache.fed_tokens)
    # All of the first, then the question alone: both part at the end of the document, where a piece began. The third
    # goes on behind the prompt of the first.
    assert fed_counts == [43, 2, 7]


def test_several_prompts_begin_at_what_all_share(session: Session) -> None:
    cache = PrefixCache(session)
    generate(session, [DOCUMENT], max_new_tokens=2, cache=cache)
    prompts = [[*DOCUMENT[:20], 1, 2], [*DOCUMENT[:26], 3]]
    texts = generate(session, prompts, max_new_tokens=5, cache=cache)
    assert [text.tokens for text in texts] == [
        generate(session, [prompt], max_new_tokens=5)[0].tokens for prompt in prompts
    ]
    assert cache.fed_tokens == 27 - (16 if session.interface.recurrent else 20)


def test_texts_that_were_not_read_to_their_end_are_kept_as_far_as_they_came(session: Session) -> None:
    cache = PrefixCache(session)
    steps = stream(session, [DOCUMENT], max_new_tokens=9, cache=cache)
    first = [next(steps).tokens[0], next(steps).tokens[0]]
    steps.close()
    assert cache.bytes > 0
    (text,) = generate(session, [[*DOCUMENT, first[0]]], max_new_tokens=3, cache=cache)
    assert (text.tokens[0], cache.fed_tokens) == (first[1], 1)


def test_memory_is_limited(session: Session) -> None:
    cache = PrefixCache(session, bytes=0)
    generate(session, [DOCUMENT], max_new_tokens=2, cache=cache)
    size = cache.bytes
    generate(session, [DOCUMENT[::-1]], max_new_tokens=2, cache=cache)
    assert cache.bytes == size  # of the latest alone
    generate(session, [DOCUMENT], max_new_tokens=2, cache=cache)
    assert cache.fed_tokens == len(DOCUMENT)
