"""What a drafter is: begin, propose, commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.inference.decoding.continuation import Continuation


class Guess(NamedTuple):
    """One token of a draft.

    Attributes:
        token: the token.
        chance: how likely the drafter thinks it is, once all before it were right; a first estimate, until the drafts
            that were checked tell more.
        source: the kind of drafter that it comes from.
        match: how many tokens of the text it was found by; 0 where that means nothing.
    """

    token: int
    chance: float
    source: str
    match: int = 0


class Drafter(Protocol):
    """Guesses how the rows of a batch go on.

    What it guesses never changes a text: every guess is checked. A drafter serves one batch at a time.
    """

    def begin(self, rows: Sequence[Continuation]) -> None:
        """Begin with new texts; the drafter may look at a row's prompt, tokens and settings, and changes nothing.

        Raises:
            InputError: the drafter cannot serve these rows.
        """

    def propose(self, begun: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[Guess]]:
        """Return a draft for each row.

        Args:
            begun: for each row guesses of another drafter, which this draft goes on from.
            limits: the longest draft of each row; 0 for none.
        """

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """Take in new tokens of a row, which stand in its text now."""
