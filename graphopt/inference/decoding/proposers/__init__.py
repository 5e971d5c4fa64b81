"""Proposers of drafts: what guesses the next tokens of a text, so that one step of the model can check several."""

from graphopt.inference.decoding.proposer import Guess, Proposer
from graphopt.inference.decoding.proposers.chain import Chain
from graphopt.inference.decoding.proposers.grammar import GrammarProposer
from graphopt.inference.decoding.proposers.heads import Heads
from graphopt.inference.decoding.proposers.lookup import Lookup
from graphopt.inference.decoding.proposers.model import ModelProposer, open_draft_model

__all__ = ["Chain", "GrammarProposer", "Guess", "Heads", "Lookup", "ModelProposer", "Proposer", "open_draft_model"]
