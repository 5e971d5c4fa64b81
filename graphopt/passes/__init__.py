"""The passes: one file, one rewrite. A new pass is one line in :data:`PASSES`."""

from __future__ import annotations

from typing import Any

from graphopt.passes.base import Change, Effect, Ledger, Options, Pass, PassReport, PassResult, Skip
from graphopt.passes.canonicalize import Canonicalize, CanonicalizeOptions
from graphopt.passes.emulate_quantization import EmulateQuantization, EmulateQuantizationOptions
from graphopt.passes.fold_norms import FoldNorms, FoldNormsOptions
from graphopt.passes.last_logits import LastLogits, LastLogitsOptions
from graphopt.passes.lower import Lower, LowerOptions, Target
from graphopt.passes.quantize_activations import QuantizeActivations, QuantizeActivationsOptions
from graphopt.passes.quantize_weights import QuantizeWeights, QuantizeWeightsOptions
from graphopt.passes.rotate import Rotate, RotateOptions

PASSES: dict[str, Any] = {
    made.name: made
    for made in (
        Canonicalize,
        FoldNorms,
        Rotate,
        QuantizeWeights,
        QuantizeActivations,
        EmulateQuantization,
        LastLogits,
        Lower,
    )
}
"""Every pass by the name that recipes call it, in the order a recipe usually has them."""

__all__ = [
    "PASSES",
    "CanonicalizeOptions",
    "Change",
    "Effect",
    "EmulateQuantizationOptions",
    "FoldNormsOptions",
    "LastLogitsOptions",
    "Ledger",
    "LowerOptions",
    "Options",
    "Pass",
    "PassReport",
    "PassResult",
    "QuantizeActivationsOptions",
    "QuantizeWeightsOptions",
    "RotateOptions",
    "Skip",
    "Target",
]
