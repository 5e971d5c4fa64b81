"""What a proposer of drafts is: begin, propose, commit; and by which name it is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.inference.decoding.continuation import Continuation
    from graphopt.inference.decoding.decoder import HiddenStep
    from graphopt.inference.session import Session


class Guess(NamedTuple):
    """One token of a draft.

    Attributes:
        token: the token.
        chance: how likely the proposer thinks it is, once all before it were right; a first estimate, until the drafts
            that were checked tell more.
        source: the kind of proposer that it comes from.
        match: how many tokens of the text it was found by; 0 where that means nothing.
    """

    token: int
    chance: float
    source: str
    match: int = 0


class Proposer(ABC):
    """Proposes how the rows of a batch go on, so that one step of the model can check several tokens.

    What it proposes never changes a text: every guess is checked. A proposer serves one batch at a time.

    A proposer with a name is one class in one file of :mod:`graphopt.inference.decoding.proposers`; nothing else has to
    know it. ``--speculate NAME`` then opens it, or ``--speculate NAME:OPTIONS`` where it takes options.

    Attributes:
        name: what the command line calls it; empty for one that only other code makes.
        takes_options: whether options follow the name, behind a colon.
        usage: how to ask for it, each form with commas between.
        summary: its line of help.
        reads_hidden: whether it is to :meth:`observe` the hidden states of all that the model reads.
    """

    name: ClassVar[str] = ""
    takes_options: ClassVar[bool] = False
    usage: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    reads_hidden: bool = False

    @classmethod
    def options_in(cls, name: str) -> str | None:
        """Return the options in a name of this proposer, empty where it takes none; ``None`` for any other name."""
        kind, colon, options = name.partition(":")
        return options if kind == cls.name and bool(colon) == cls.takes_options else None

    @classmethod
    def open(cls, session: Session, options: str) -> Proposer:  # noqa: ARG003, for those that read the model
        """Return the proposer for the texts of a model.

        Args:
            session: the model that checks.
            options: from :meth:`options_in`.

        Raises:
            InputError: there are no such options, or it cannot propose for this model.
        """
        return cls()

    @abstractmethod
    def begin(self, rows: Sequence[Continuation]) -> None:
        """Begin with new texts; the proposer may look at a row's prompt, tokens and settings, and changes nothing.

        Raises:
            InputError: the proposer cannot serve these rows.
        """

    def observe(self, step: HiddenStep) -> None:  # noqa: B027, most need not
        """Take in the hidden states of a step of the model, prompts included; guesses may be among its tokens."""

    @abstractmethod
    def propose(self, prefixes: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[Guess]]:
        """Return a draft for each row.

        Args:
            prefixes: for each row guesses of another proposer, which this draft goes on from.
            limits: the longest draft of each row; 0 for none.
        """

    @abstractmethod
    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """Take in new tokens of a row, which stand in its text now."""
