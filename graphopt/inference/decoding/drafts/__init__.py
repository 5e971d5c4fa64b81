"""Drafters: what guesses the next tokens of a text, so that one step of the model can check several."""

from graphopt.inference.decoding.drafts.chain import Chain
from graphopt.inference.decoding.drafts.drafter import Drafter, Guess
from graphopt.inference.decoding.drafts.forced import Forced
from graphopt.inference.decoding.drafts.heads import Heads
from graphopt.inference.decoding.drafts.lookup import Lookup
from graphopt.inference.decoding.drafts.model import ModelDrafter, model_beside

__all__ = ["Chain", "Drafter", "Forced", "Guess", "Heads", "Lookup", "ModelDrafter", "model_beside"]
