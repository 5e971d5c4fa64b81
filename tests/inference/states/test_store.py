"""What every store of states does, and what one does not offer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from graphopt.errors import InputError
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.session import load
from graphopt.inference.states.growing import GrowingStates
from graphopt.inference.states.store import Mark

LAYERS, KV_HEADS, HEAD_SIZE = 2, 2, 16  # of the small Llama


def test_states_that_grow(llama_artifact: Path) -> None:
    decoder = Decoder(load(llama_artifact, threads=1), 2)
    ids = np.arange(12).reshape(2, 6)
    assert decoder.states.bytes == 0
    expected = decoder.step(ids)[:, -1].copy()
    assert decoder.states.bytes == 2 * LAYERS * 2 * KV_HEADS * 6 * HEAD_SIZE * 4  # keys and values, in float32
    mark = decoder.mark()
    decoder.step(ids[:, :3])
    assert decoder.room_for_drafts().min() > 1000  # no token has to stay
    decoder.roll_back(mark, np.array([5, 5]))
    assert decoder.tokens.tolist() == [5, 5]
    # a step of one token and one of six sum in another order
    assert np.allclose(decoder.step(ids[:, 5:])[:, -1], expected, atol=1e-4)


def test_states_that_grow_are_copied_and_saved(llama_artifact: Path, tmp_path: Path) -> None:
    session = load(llama_artifact, threads=1)
    decoder, ids = Decoder(session, 2), np.arange(12).reshape(2, 6)
    assert isinstance(decoder.states, GrowingStates)
    decoder.step(ids)
    decoder.save(tmp_path / "states")
    fork, copy = decoder.fork([1, 0]), Decoder.restore(session, tmp_path / "states")
    expected = decoder.step(ids)
    assert np.array_equal(copy.step(ids), expected)
    assert np.allclose(fork.step(ids[::-1]), expected[::-1], atol=1e-6)  # rows of a product may be summed otherwise


def test_an_ability_that_a_store_does_not_name_is_refused(llama_artifact: Path, tmp_path: Path) -> None:
    session = load(llama_artifact, threads=1)
    decoder = Decoder(session, 1)
    decoder.states.abilities = frozenset()
    for use in (lambda: decoder.fork([0]), lambda: decoder.save(tmp_path / "states")):
        with pytest.raises(InputError, match="cannot do this: .*page_kv") as caught:
            use()
        assert caught.value.file == session.file
    assert not (tmp_path / "states").exists()


def test_rows_that_cannot_be_rewound_leave_all_as_it_was(llama_artifact: Path) -> None:
    decoder = Decoder(load(llama_artifact, threads=1), 2)
    decoder.step(np.arange(12).reshape(2, 6))
    size = decoder.states.bytes
    for lengths, message in ((7, "has 6 tokens and cannot be rewound to 7"), (np.array([3, 4]), "by the same columns")):
        with pytest.raises(InputError, match=message):
            decoder.rewind(lengths)
    assert (decoder.states.bytes, decoder.tokens.tolist(), decoder.length) == (size, [6, 6], 6)
    assert Mark(decoder.tokens).checkpoint == ()
