"""Tokens that a grammar leaves no choice about: keys and punctuation of a JSON schema, literals of an expression."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.inference.decoding.proposer import Guess, Proposer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.inference.decoding.continuation import Continuation

_CHANCE = 0.9
"""A grammar forces bytes, and the model may spell them by other tokens."""


class GrammarProposer(Proposer):
    """Proposes what the grammar of a row forces; nothing for a row without a grammar."""

    name = "grammar"
    usage = "grammar"
    summary = "only what --json-schema or --regex leaves no choice about; it goes before all other drafts too"

    def begin(self, rows: Sequence[Continuation]) -> None:
        """See :class:`Proposer`."""
        self._rows = rows

    def propose(self, prefixes: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[Guess]]:
        """See :class:`Proposer`."""
        return [
            [] if prefix else [Guess(token, _CHANCE, self.name) for token in row.forced_tokens()[:limit]]
            for row, prefix, limit in zip(self._rows, prefixes, limits, strict=True)
        ]

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """See :class:`Proposer`; the row's own grammar has taken them."""
