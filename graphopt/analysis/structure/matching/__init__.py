"""Which node of one graph is which node of another: by structure and weights, names are labels.

What is known comes first, such as a compiler's own record. Then whole segments that are isomorphic, then nodes whose
surroundings of a few edges are the same and occur once, then the neighbours of nodes that were matched, then what sits
between the same neighbours. Surroundings are bounded on purpose: a hash of everything that a node depends on changes
for all nodes behind one change (openxla's hlo_diff tells of that trap).
"""

from graphopt.analysis.structure.matching.matcher import CONFIDENCE, Evidence, Matching, match
from graphopt.analysis.structure.matching.side import Side

__all__ = ["CONFIDENCE", "Evidence", "Matching", "Side", "match"]
