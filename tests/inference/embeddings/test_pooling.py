"""Pooling against its definitions, written out text by text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from graphopt.artifact.hf_config import Pooling, pooling_of
from graphopt.errors import InputError
from graphopt.inference.embeddings.pooling import pool

# One sum of at most 6 float64 numbers, rounded to float32 once.
FLOAT32 = 1e-6


def by_definition(states: np.ndarray, way: Pooling) -> np.ndarray:
    """Pool the hidden states [tokens, width] of one text."""
    positions = np.arange(1, len(states) + 1)[:, None]
    return {
        "mean": states.sum(0) / len(states),
        "mean_sqrt_len_tokens": states.sum(0) / np.sqrt(len(states)),
        "weightedmean": (positions * states).sum(0) / positions.sum(),
        "max": states.max(0),
        "cls": states[0],
        "lasttoken": states[-1],
    }[way]


@pytest.mark.parametrize("way", get_args(Pooling))
def test_padding_counts_for_nothing(way: Pooling) -> None:
    hidden = np.random.default_rng(0).standard_normal((3, 6, 5)).astype(np.float32)
    lengths = [6, 1, 4]
    mask = np.arange(6) < np.array(lengths)[:, None]
    hidden[~mask] = 1e6
    pooled_rows = pool(hidden, mask, [way])
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(
            pooled_rows[row], by_definition(hidden[row, :length], way), atol=FLOAT32, rtol=FLOAT32
        )


def test_several_ways_stand_side_by_side_and_none_is_the_mean() -> None:
    hidden, mask = np.random.default_rng(1).standard_normal((2, 3, 4)).astype(np.float32), np.ones((2, 3), bool)
    parts = [pool(hidden, mask, ["cls"]), pool(hidden, mask, [])]
    np.testing.assert_array_equal(pool(hidden, mask, ["cls", "mean"]), np.concatenate(parts, axis=1))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"word_embedding_dimension": 4, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, ["mean"]),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True, "include_prompt": True}, ["cls", "max"]),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, ["mean_sqrt_len_tokens"]),
        ({"pooling_mode": "lasttoken"}, ["lasttoken"]),
        ({}, []),
    ],
)
def test_both_spellings_of_sentence_transformers_are_read(
    config: dict[str, object], expected: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert pooling_of(file) == expected
    assert pooling_of(tmp_path / "absent.json") == []


def test_a_pooling_that_is_not_known_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"pooling_mode": "attention"}')
    with pytest.raises(InputError, match=r"the pooling attention is not known.*known are cls, mean"):
        pooling_of(file)
