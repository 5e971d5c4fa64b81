"""Norms by meaning: what computes a norm, however an exporter spells it, becomes the standard op.

    x / sqrt(mean(x^2) + epsilon) * gain                            ->   RMSNormalization(x, gain; epsilon)
    (x - mean(x)) / sqrt(variance(x) + epsilon) * gain + bias       ->   LayerNormalization(x, gain, bias; epsilon)

What a spelling computes is found out by running it, as for masks: the part of the graph between one value and another,
around a mean along the last axis, is cut out and run on rows of all sizes (:mod:`.region`, :mod:`.run`). If it is a
norm, its gain, bias and epsilon follow from what comes out, and all rows must agree with the definition
(:mod:`.meaning`). So casts, powers, products and sums may stand in any order: a gain before or behind a cast, as
1 + gain, a reciprocal of a root. What divides by a root and is no norm (an epsilon outside of the root, a floor under
it) is refused.
"""

from graphopt.passes.lift.canonicalize.norms.lift_norms import lift_norms

__all__ = [
    "lift_norms",
]
