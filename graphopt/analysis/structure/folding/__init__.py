"""Repeated layers of a graph, found by structure alone: names are labels.

    embedding, ((attention, MLP) x 5, (wide attention, MLP)) x 4, norm, lm_head

Nodes that every path from tokens to logits crosses cut the graph into segments (:mod:`.trunk`); where there are few of
them, equal groups grow in lockstep (:mod:`.lockstep`). Segments are compared exactly, by structure (:mod:`.canonical`);
by what their numbers are stored in they may differ. Repeats are found in the string of structures, nested
(:mod:`.repeats`).
"""

from graphopt.analysis.structure.folding.folding import Folding, fold
from graphopt.analysis.structure.folding.mixers import Mixer, mixers
from graphopt.analysis.structure.folding.repeats import Part, Repeat
from graphopt.analysis.structure.folding.trunk import Cuts, Segment

__all__ = ["Cuts", "Folding", "Mixer", "Part", "Repeat", "Segment", "fold", "mixers"]
