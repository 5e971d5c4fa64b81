"""A model that drafts, for which another proposer drafts in turn: ``verified:A,B``.

Three models of rising size, or a lookup and two models, write one text (TriForce, Sun et al., 2024, section 4.2; Staged
Speculative Decoding, Spector and Re, 2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.errors import InputError
from graphopt.inference.decoding.proposers.model import ModelProposer
from graphopt.inference.decoding.proposers.registry import find_proposer, open_proposer

if TYPE_CHECKING:
    from graphopt.inference.decoding.proposer import Proposer
    from graphopt.inference.session import Session


class CascadeProposer(ModelProposer):
    """Opens a model that drafts and has its own proposer."""

    name = "verified"
    takes_options = True
    usage = "verified:A,B"
    summary = "A drafts for B, a smaller model or self:..., which drafts for the model"

    @classmethod
    def open(
        cls,
        session: Session,
        options: str,
        proposer: Proposer | None = None,  # noqa: ARG003, the options name it
    ) -> ModelProposer:
        """See :class:`Proposer`.

        Raises:
            InputError: the options are not two names, or the second one is no model.
        """
        first, comma, second = options.partition(",")
        kind, inner = find_proposer(second) if comma else (cls, "")
        if kind is cls or not issubclass(kind, ModelProposer):
            raise InputError(
                f"there are no drafts 'verified:{options}'",
                remedy="give verified:A,B: A is any drafts, and B the folder of a smaller model or self:...",
            )
        return kind.open(session, inner, open_proposer(session, first))
