"""Drafters by the names that the command line calls them."""

from __future__ import annotations

from pathlib import Path

from graphopt.decoding.drafts.chain import Chain
from graphopt.decoding.drafts.drafter import Drafter
from graphopt.decoding.drafts.forced import Forced
from graphopt.decoding.drafts.lookup import Lookup
from graphopt.decoding.drafts.model import ModelDrafter, check_same_tokens
from graphopt.decoding.drafts.own import own_drafter
from graphopt.decoding.speculation import Speculation
from graphopt.errors import InputError
from graphopt.session import Session, load

AUTO = "auto"
_OWN = "self:"


def speculation_named(session: Session, name: str, tokens: str = AUTO) -> Speculation:
    """Return the drafter that a name stands for; before it goes what a grammar forces.

    Args:
        session: the model whose texts it drafts.
        name: ``lookup``; the folder of a smaller model; ``self:streaming`` or ``self:layers=N``; or ``auto``: lookup,
            only where texts stay the same to the bit.
        tokens: how long drafts are: a number, or ``auto``.

    Raises:
        InputError: there is no such drafter, the folder's model cannot draft for this one, or a number is wrong.
    """
    if tokens != AUTO and not tokens.isdigit():
        raise InputError(f"a draft cannot have {tokens!r} tokens", remedy="give a number from 0 to 11, or auto")
    length = None if tokens == AUTO else int(tokens)
    drafter: Drafter
    if name in ("lookup", AUTO):
        drafter = Lookup()
    elif name.startswith(_OWN):
        drafter = own_drafter(session, name.removeprefix(_OWN))
    else:
        if not Path(name).exists():
            raise InputError(
                f"there is no drafter {name!r}, and no such folder",
                remedy="known are lookup, auto, self:streaming, self:layers=N, and folders of smaller models",
            )
        threads = session.inference.get_session_options().intra_op_num_threads
        smaller = load(name, threads=threads, native=session.native, device=session.device)
        check_same_tokens(session, smaller)
        drafter = ModelDrafter(smaller)
    return Speculation(Chain(Forced(), drafter), length, strict=name == AUTO)
