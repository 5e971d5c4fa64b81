from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.errors import InputError
from graphopt.inference.decoding.stop_strings import StopStrings

TEXTS = st.text("abé", max_size=20)


def cut(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first, by definition; of several, the longest."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)]
    return text


@given(st.lists(TEXTS, max_size=6), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
def test_pieces_add_up_to_the_text_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    watch = StopStrings(stops)
    given_out = ""
    for count, piece in enumerate(pieces, start=1):
        given_out += watch.push(piece)
        so_far = "".join(pieces[:count])
        # nothing that a longer text could take back, and nothing held back without need
        assert given_out == cut(so_far, stops) or watch.match is None
        assert cut(so_far, stops).startswith(given_out)
        if watch.match is not None:
            assert watch.match in so_far
            break
        pending_text = so_far[len(given_out) :]
        assert not pending_text or any(stop.startswith(pending_text) for stop in stops)
        assert all(not so_far.endswith(stop[:n]) or n <= len(pending_text) for stop in stops for n in range(len(stop)))
    else:
        given_out += watch.finish()
    assert given_out == cut("".join(pieces), stops)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InputError, match="a stop string is empty"):
        StopStrings(["a", ""])
