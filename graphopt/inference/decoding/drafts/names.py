"""Drafters by the names that the command line calls them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphopt.errors import InputError
from graphopt.inference.decoding.drafts.chain import Chain
from graphopt.inference.decoding.drafts.forced import Forced
from graphopt.inference.decoding.drafts.heads import Heads
from graphopt.inference.decoding.drafts.lookup import Lookup
from graphopt.inference.decoding.drafts.model import ModelDrafter, model_beside
from graphopt.inference.decoding.drafts.self_draft import own_drafter
from graphopt.inference.decoding.speculation import Speculation

if TYPE_CHECKING:
    from graphopt.inference.decoding.drafts.drafter import Drafter
    from graphopt.inference.session import Session

AUTO = "auto"
_HEADS, _OWN, _VERIFIED = "heads", "self:", "verified:"


def speculation_named(session: Session, name: str, tokens: str = AUTO) -> Speculation:
    """Return the drafter that a name stands for; before it goes what a grammar forces.

    Args:
        session: the model whose texts it drafts.
        name: ``lookup``; the folder of a smaller model; ``heads`` beside the model; ``self:streaming``,
            ``self:retrieval`` or ``self:layers=N``; ``verified:A,B``: B drafts, and A drafts for B; or ``auto``:
            lookup, only where texts stay the same to the bit.
        tokens: how long drafts are: a number, or ``auto``.

    Raises:
        InputError: there is no such drafter, the folder's model cannot draft for this one, or a number is wrong.
    """
    if tokens != AUTO and not tokens.isdigit():
        raise InputError(f"a draft cannot have {tokens!r} tokens", remedy="give a number from 0 to 11, or auto")
    length = None if tokens == AUTO else int(tokens)
    return Speculation(Chain(Forced(), _drafter(session, name)), length, strict=name == AUTO)


def _drafter(session: Session, name: str) -> Drafter:
    if name in ("lookup", AUTO):
        return Lookup()
    if name == _HEADS:
        return Heads(session)
    if name.startswith(_VERIFIED):
        first, comma, second = name.removeprefix(_VERIFIED).partition(",")
        if not comma or second in ("lookup", AUTO, _HEADS) or second.startswith(_VERIFIED):
            raise InputError(
                f"there is no drafter {name!r}",
                remedy="give verified:A,B: A is any drafter, and B the folder of a smaller model or self:...",
            )
        return _model(session, second, _drafter(session, first))
    return _model(session, name)


def _model(session: Session, name: str, drafter: Drafter | None = None) -> ModelDrafter:
    """Return the model that a name stands for as a drafter, for which ``drafter`` drafts."""
    if name.startswith(_OWN):
        return own_drafter(session, name.removeprefix(_OWN), drafter)
    if not Path(name).exists():
        raise InputError(
            f"there is no drafter {name!r}, and no such folder",
            remedy="known are lookup, auto, heads, self:streaming, self:retrieval, self:layers=N, verified:A,B, and "
            "folders of smaller models",
        )
    return ModelDrafter(model_beside(session, Path(name)), drafter=drafter)
