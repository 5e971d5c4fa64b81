"""Proposers by the names that the command line calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.errors import InputError
from graphopt.inference.decoding.proposer import Proposer
from graphopt.inference.decoding.proposers.chain import Chain
from graphopt.inference.decoding.proposers.grammar import GrammarProposer
from graphopt.inference.decoding.proposers.lookup import Lookup
from graphopt.inference.decoding.speculation import Speculation
from graphopt.util.registry import Registry

if TYPE_CHECKING:
    from graphopt.inference.session import Session

AUTO = "auto"
"""Lookup, only where texts stay the same to the bit."""


def _name_of(member: object) -> str | None:
    return (member.name or None) if isinstance(member, type) and issubclass(member, Proposer) else None


PROPOSERS: Registry[type[Proposer]] = Registry(
    "graphopt.inference.decoding.proposers", kind="proposer", name_of=_name_of
)
"""Each class in a file of this folder that has a name."""


def open_speculation(session: Session, name: str, tokens: str = AUTO) -> Speculation:
    """Return drafts by name; before them goes what a grammar forces.

    Args:
        session: the model whose texts they are for.
        name: of a proposer, with its options, as :func:`list_proposers` lists them; or ``auto``.
        tokens: how long drafts are: a number, or ``auto``.

    Raises:
        InputError: there is no such proposer, it cannot propose for this model, or a number is wrong.
    """
    if tokens != AUTO and not tokens.isdigit():
        raise InputError(f"a draft cannot have {tokens!r} tokens", remedy="give a number from 0 to 11, or auto")
    length = None if tokens == AUTO else int(tokens)
    return Speculation(Chain(GrammarProposer(), open_proposer(session, name)), length, strict=name == AUTO)


def open_proposer(session: Session, name: str) -> Proposer:
    """Return the proposer of a name for a model; see :func:`find_proposer` and :meth:`Proposer.open` for errors."""
    kind, options = find_proposer(Lookup.name if name == AUTO else name)
    return kind.open(session, options)


def find_proposer(name: str) -> tuple[type[Proposer], str]:
    """Return the class of proposers that a name stands for, and the options in the name.

    Raises:
        InputError: there is none.
    """
    first = name.partition(":")[0]
    for kind in sorted(PROPOSERS.values(), key=lambda member: member.name != first):
        options = kind.options_in(name)
        if options is not None:
            return kind, options
    forms = ", ".join(kind.usage for kind in PROPOSERS.values())
    raise InputError(f"there are no drafts {name!r}, and no such folder", remedy=f"known are {AUTO}, {forms}")


def list_proposers() -> dict[str, str]:
    """Return how to ask for each proposer on the command line, with its line of help."""
    summaries = {kind.usage: kind.summary for kind in PROPOSERS.values()}
    return {AUTO: "lookup, only where texts stay the same to the bit", **summaries}
