"""Several proposers, of which each goes on where the one before it stops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.inference.decoding.proposer import Guess, Proposer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.inference.decoding.continuation import Continuation
    from graphopt.inference.decoding.decoder import HiddenStep


class Chain(Proposer):
    """Drafts of the first proposer, continued by the second, and so on.

    Args:
        proposers: in their order.
    """

    def __init__(self, *proposers: Proposer) -> None:
        self._proposers = proposers
        self.reads_hidden = any(proposer.reads_hidden for proposer in proposers)

    def observe(self, step: HiddenStep) -> None:
        """See :class:`Proposer`."""
        for proposer in self._proposers:
            if proposer.reads_hidden:
                proposer.observe(step)

    def begin(self, rows: Sequence[Continuation]) -> None:
        """See :class:`Proposer`."""
        for proposer in self._proposers:
            proposer.begin(rows)

    def propose(self, prefixes: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[Guess]]:
        """See :class:`Proposer`."""
        drafts: list[list[Guess]] = [[] for _ in limits]
        for proposer in self._proposers:
            room = [limit - len(draft) for limit, draft in zip(limits, drafts, strict=True)]
            if not any(room):
                break
            texts = [[*prefix, *(guess.token for guess in d)] for prefix, d in zip(prefixes, drafts, strict=True)]
            for draft, continuation in zip(drafts, proposer.propose(texts, room), strict=True):
                draft += continuation
        return drafts

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """See :class:`Proposer`."""
        for proposer in self._proposers:
            proposer.commit(row, tokens)
