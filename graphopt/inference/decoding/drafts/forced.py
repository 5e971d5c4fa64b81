"""Tokens that a grammar leaves no choice about: keys and punctuation of a JSON schema, literals of an expression."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.inference.decoding.drafts.drafter import Guess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.inference.decoding.continuation import Continuation

SOURCE = "grammar"

_CHANCE = 0.9
"""A grammar forces bytes, and the model may spell them by other tokens."""


class Forced:
    """Drafts what the grammar of a row forces; nothing for a row without a grammar."""

    def begin(self, rows: Sequence[Continuation]) -> None:
        """See :class:`Drafter`."""
        self._rows = rows

    def propose(self, begun: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[Guess]]:
        """See :class:`Drafter`."""
        return [
            [] if first else [Guess(token, _CHANCE, SOURCE) for token in row.forced()[:limit]]
            for row, first, limit in zip(self._rows, begun, limits, strict=True)
        ]

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """See :class:`Drafter`; the row's own grammar has taken them."""
