"""What each op does to bases: one function for an op, with the algebra that allows it, and one table of them.

The algebra is stated for row vectors, x -> x Q.
"""

from graphopt.analysis.bases.rules.common import observe
from graphopt.analysis.bases.rules.table import RULES

__all__ = ["RULES", "observe"]
