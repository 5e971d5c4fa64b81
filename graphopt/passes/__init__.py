"""The passes: one file or folder, one rewrite. A new pass is one line in :data:`PASSES`."""

from __future__ import annotations

from typing import Any

from graphopt.passes.base import Change, Effect, Ledger, Options, Pass, PassReport, PassResult, Skip
from graphopt.passes.canonicalize import Canonicalize, CanonicalizeOptions
from graphopt.passes.emulate_quantization import EmulateQuantization, EmulateQuantizationOptions
from graphopt.passes.float16 import Float16, Float16Options
from graphopt.passes.fold_norms import FoldNorms, FoldNormsOptions
from graphopt.passes.last_logits import LastLogits, LastLogitsOptions
from graphopt.passes.lower import Lower, LowerOptions, Target
from graphopt.passes.merge_products import MergeProducts, MergeProductsOptions
from graphopt.passes.page_kv import PageKV, PageKVOptions
from graphopt.passes.quantize_activations import QuantizeActivations, QuantizeActivationsOptions
from graphopt.passes.quantize_kv import QuantizeKV, QuantizeKVOptions
from graphopt.passes.quantize_weights import QuantizeWeights, QuantizeWeightsOptions
from graphopt.passes.rotate import Rotate, RotateOptions
from graphopt.passes.sparse_kv import SparseKV, SparseKVOptions

PASSES: dict[str, Any] = {
    made.name: made
    for made in (
        Canonicalize,
        FoldNorms,
        Rotate,
        QuantizeWeights,
        QuantizeActivations,
        EmulateQuantization,
        PageKV,
        QuantizeKV,
        SparseKV,
        LastLogits,
        Lower,
        MergeProducts,
        Float16,
    )
}
"""Every pass by the name that recipes call it, in the order a recipe usually has them."""

__all__ = [
    "PASSES",
    "CanonicalizeOptions",
    "Change",
    "Effect",
    "EmulateQuantizationOptions",
    "Float16Options",
    "FoldNormsOptions",
    "LastLogitsOptions",
    "Ledger",
    "LowerOptions",
    "MergeProductsOptions",
    "Options",
    "PageKVOptions",
    "Pass",
    "PassReport",
    "PassResult",
    "QuantizeActivationsOptions",
    "QuantizeKVOptions",
    "QuantizeWeightsOptions",
    "RotateOptions",
    "Skip",
    "SparseKVOptions",
    "Target",
]
