"""Tokens into text, as they arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.inference.session import Session

_INCOMPLETE = "\ufffd"  # stands for bytes that are not (yet) a whole character


class TextStream:
    """Turns tokens into text as they arrive, whole characters only.

    A token of a byte-level tokenizer may hold a part of a character, and some decoders drop the space before a first
    word. So each piece is what a token adds to the text of a few tokens before it.

    Args:
        session: the model, whose tokenizer is used.
        prompt: the tokens after which the text begins.
    """

    _CONTEXT = 8  # tokens of the prompt that are enough to decide about a leading space

    def __init__(self, session: Session, prompt: Sequence[int]) -> None:
        self._session = session
        self._ids = list(prompt[-self._CONTEXT :])
        self._emitted_count = len(self._ids)  # tokens whose text has been returned

    def push(self, token: int) -> str:
        """Return the text that ``token`` completes; may be empty."""
        self._ids.append(token)
        text = self._session.decode(self._ids)
        before = self._session.decode(self._ids[: self._emitted_count])
        if len(text) <= len(before) or text.endswith(_INCOMPLETE):
            return ""
        del self._ids[: self._emitted_count]
        self._emitted_count = len(self._ids)
        return text[len(before) :]

    def finish(self) -> str:
        """Return what was held back, with a mark (U+FFFD) for a character that was never completed."""
        before = self._session.decode(self._ids[: self._emitted_count])
        return self._session.decode(self._ids)[len(before) :]
