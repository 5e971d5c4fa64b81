"""How good a compressed model still is: on text that nothing was fitted to, beside the model that it was made from."""

from __future__ import annotations

from graphopt.quality.compare import Quality, compare
from graphopt.quality.verdict import Requirement, Verdict, verdict_of

__all__ = ["Quality", "Requirement", "Verdict", "compare", "verdict_of"]
