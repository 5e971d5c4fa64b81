"""Stop strings: a text ends before the one that is complete first, and no part of one is ever given out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopStrings:
    """Watches a text that arrives in pieces.

    The end of the text that may be the beginning of a stop string is held back until the next piece decides.

    Args:
        strings: the stop strings.

    Attributes:
        match: the stop string that ended the text, or ``None`` so far.

    Raises:
        InputError: one of them is empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if "" in strings:
            raise InputError("a stop string is empty", remedy="give at least one character, or leave it out")
        self._strings = tuple(strings)
        self._pending = ""
        self.match: str | None = None

    def push(self, piece: str) -> str:
        """Add a piece and return the text that is certain to stand before any stop string."""
        text = self._pending + piece
        # The one that is complete first, whatever the pieces are.
        ends = [
            (text.find(string) + len(string), text.find(string), string) for string in self._strings if string in text
        ]
        if ends:
            _, position, self.match = min(ends)
            self._pending = ""
            return text[:position]
        keep = len(text) - max((_overlap(text, string) for string in self._strings), default=0)
        self._pending = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """Return what was held back: the text has ended for another reason."""
        pending, self._pending = self._pending, ""
        return pending


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` with which ``stop`` begins, but not all of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
