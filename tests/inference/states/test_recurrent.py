"""States that a recurrence holds: a step is taken back by a checkpoint, and the tokens that stay are fed once more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from graphopt.errors import InputError
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.session import Session, load
from graphopt.inference.states.growing import RecurrentStates
from graphopt.inference.states.hybrid import HybridStates

IDS = np.random.default_rng(0).integers(0, 300, (2, 24))
# A step of one token and one of several sum in another order.
ATOL = 1e-5


@pytest.fixture(scope="module")
def session(make_artifact: Callable[[str], Path]) -> Session:
    return load(make_artifact("qwen3_next"), threads=1)


@pytest.fixture(scope="module")
def expected(session: Session) -> np.ndarray:
    """The logits of all tokens of the first row, fed at once."""
    return Decoder(session, 1).step(IDS[:1])[0].copy()


def test_each_kind_of_state_has_its_store(session: Session, make_artifact: Callable[[str], Path]) -> None:
    decoder = Decoder(session, 2)
    assert isinstance(decoder.states, HybridStates)
    empty = decoder.states.bytes
    assert empty == 2 * 4 * (128 * 3 + 4 * 16 * 16)  # float32: the tail of the convolution, and the matrix of each head
    decoder.step(IDS[:, :8])
    assert decoder.states.bytes == empty + 2 * 2 * 2 * 8 * 16 * 4
    assert isinstance(Decoder(load(make_artifact("mamba"), threads=1), 1).states, RecurrentStates)


def test_tokens_that_were_taken_back_leave_no_trace(session: Session, expected: np.ndarray) -> None:
    decoder = Decoder(session, 1)
    decoder.step(IDS[:1, :8])
    mark = decoder.mark()
    decoder.step(IDS[1:, 8:14])
    decoder.roll_back(mark, np.array([11]))
    assert decoder.tokens.tolist() == [8]  # where it was: what stays is fed again
    assert np.allclose(decoder.step(IDS[:1, 8:])[0], expected[8:], atol=ATOL)


def test_a_step_of_which_all_tokens_stay_is_not_taken_back(session: Session, expected: np.ndarray) -> None:
    decoder = Decoder(session, 1)
    mark = decoder.mark()
    decoder.step(IDS[:1, :8])
    decoder.roll_back(mark, np.array([8]))
    assert decoder.tokens.tolist() == [8]
    assert np.allclose(decoder.step(IDS[:1, 8:])[0], expected[8:], atol=ATOL)


def test_rewinding_goes_to_where_it_was_kept_and_to_the_beginning(session: Session, expected: np.ndarray) -> None:
    decoder = Decoder(session, 1)
    decoder.step(IDS[:1, :8])
    decoder.keep()
    decoder.step(IDS[1:, :5])
    size = decoder.states.bytes
    with pytest.raises(InputError, match="from 13 to 9 tokens: a recurrent state.*rewind to 0 or 8"):
        decoder.rewind(9)
    assert (decoder.tokens.tolist(), decoder.states.bytes) == ([13], size)
    decoder.rewind(8)
    assert np.allclose(decoder.step(IDS[:1, 8:])[0], expected[8:], atol=ATOL)
    decoder.rewind(0)
    assert np.allclose(decoder.step(IDS[:1])[0], expected, atol=ATOL)
    with pytest.raises(InputError, match="rewind to 0,"):
        decoder.rewind(8)  # it was kept in a text that is gone


def test_the_nearest_length_that_a_text_can_be_rewound_to(session: Session) -> None:
    decoder = Decoder(session, 1)
    decoder.step(IDS[:1, :8])
    decoder.keep()
    decoder.step(IDS[:1, 8:13])
    assert [decoder.nearest(length) for length in (13, 12, 8, 7, 0)] == [13, 8, 8, 0, 0]


def test_rows_continue_from_copies(session: Session, expected: np.ndarray) -> None:
    decoder = Decoder(session, 2)
    decoder.step(IDS[:, :8])
    fork = decoder.fork([1, 0, 0])
    decoder.step(IDS[:, 8:10])
    logits = fork.step(np.repeat(IDS[:1, 8:], 3, axis=0))
    assert np.allclose(logits[1:], expected[8:], atol=ATOL)
    assert not np.allclose(logits[0], expected[8:], atol=0.01)
    assert fork.tokens.tolist() == [24] * 3


def test_states_in_a_file(session: Session, expected: np.ndarray, tmp_path: Path) -> None:
    decoder = Decoder(session, 1)
    decoder.step(IDS[:1, :8])
    decoder.save(tmp_path / "states")
    copy = Decoder.restore(session, tmp_path / "states")
    assert copy.tokens.tolist() == [8]
    assert np.allclose(copy.step(IDS[:1, 8:])[0], expected[8:], atol=ATOL)
    pair = Decoder(session, 2)
    pair.step(IDS[:, :8], (np.arange(8) >= np.array([[0], [3]])).astype(np.int64))
    with pytest.raises(InputError, match="without padding"):
        pair.save(tmp_path / "padded")
    assert not (tmp_path / "padded").exists()


def test_padding_does_not_touch_a_row_while_another_goes_on(session: Session, expected: np.ndarray) -> None:
    decoder = Decoder(session, 2)
    decoder.step(IDS[:, :8])
    for column in range(8, 12):  # the first row has ended
        mask = np.array([[0], [1]])
        decoder.step(IDS[:, column : column + 1], mask)
    logits = decoder.step(np.repeat(IDS[:1, 8:], 2, axis=0))
    assert np.allclose(logits[0], expected[8:], atol=ATOL)
