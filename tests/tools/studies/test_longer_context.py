"""The parts of the measurement beyond a trained length: ranges of positions, copies, what is scored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from graphopt.passes.cache.page_kv import PageKV
from graphopt.passes.lift.canonicalize import Canonicalize
from graphopt.quality.evaluation import negative_log_likelihood
from tests.families import POSITIONS, VOCABULARY
from tools.bench.parts.held_out import optimize_artifact, without_limit
from tools.studies import longer_context


def test_ranges_double_from_the_trained_length_on() -> None:
    assert longer_context.buckets(1024, 4096) == [(0, 512), (512, 1024), (1024, 2048), (2048, 4096)]


def test_the_file_comes_twice_at_the_distance_and_other_text_stands_between() -> None:
    ids = np.arange(10_000)
    copies = longer_context.copies(ids, [512, 1536], 3)
    copy_tokens = longer_context.COPY_TOKENS
    assert [[len(sequence) for sequence in sequences] for sequences in copies] == [
        [512 + copy_tokens] * 3,
        [1536 + copy_tokens] * 3,
    ]
    for far, sequences in zip((512, 1536), copies, strict=True):
        for sequence in sequences:
            np.testing.assert_array_equal(sequence[:copy_tokens], sequence[far:])
            assert not set(sequence[copy_tokens:far]) & set(sequence[:copy_tokens])
    assert len({sequence[0] for sequence in copies[0]}) == 3
    # the same files at every distance, so that columns compare
    assert [sequence[0] for sequence in copies[0]] == [sequence[0] for sequence in copies[1]]


def test_tokens_are_scored_where_they_stand(
    llama_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = without_limit(optimize_artifact(llama_artifact, tmp_path / "paged", Canonicalize(), PageKV(), run=False))
    assert session.max_positions is None
    texts = [np.random.default_rng(seed).integers(0, VOCABULARY, 2 * POSITIONS + 1) for seed in (0, 1)]
    expected = [negative_log_likelihood(session.logits(ids[None, :-1])[0], ids[1:]) for ids in texts]
    ranges = longer_context.buckets(POSITIONS, 2 * POSITIONS)
    losses = longer_context.by_position(session, texts, ranges, 2 * POSITIONS)
    assert [len(values) for values in losses] == [POSITIONS, POSITIONS, 2 * POSITIONS]
    for nats, (begin, end) in zip(losses, ranges, strict=True):
        # pieces of another length add in another order: float32
        np.testing.assert_allclose(nats, np.concatenate([values[begin:end] for values in expected]), atol=1e-4)
    assert len(longer_context.by_position(session, texts, ranges, POSITIONS)) == 2
    monkeypatch.setattr(longer_context, "COPY_TOKENS", 20)
    (pairs,) = longer_context.copies(texts[0], [50], 2)
    scores = longer_context.second_copies(session, pairs)
    expected_scores = [negative_log_likelihood(session.logits(ids[None, :-1])[0], ids[1:])[50:] for ids in pairs]
    np.testing.assert_allclose(scores, np.concatenate(expected_scores), atol=1e-4)
