"""Two drafters, of which the second goes on where the first stops."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.inference.decoding.continuation import Continuation
    from graphopt.inference.decoding.drafts.drafter import Drafter, Guess


class Chain:
    """Drafts of the first drafter, continued by the second, and so on.

    Args:
        drafters: the drafters, in their order.
    """

    def __init__(self, *drafters: Drafter) -> None:
        self._drafters = drafters

    def begin(self, rows: Sequence[Continuation]) -> None:
        """See :class:`Drafter`."""
        for drafter in self._drafters:
            drafter.begin(rows)

    def propose(self, begun: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[Guess]]:
        """See :class:`Drafter`."""
        drafts: list[list[Guess]] = [[] for _ in limits]
        for drafter in self._drafters:
            left = [limit - len(draft) for limit, draft in zip(limits, drafts, strict=True)]
            if not any(left):
                break
            so_far = [[*first, *(guess.token for guess in d)] for first, d in zip(begun, drafts, strict=True)]
            for draft, more in zip(drafts, drafter.propose(so_far, left), strict=True):
                draft += more
        return drafts

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """See :class:`Drafter`."""
        for drafter in self._drafters:
            drafter.commit(row, tokens)
