"""What each op does to bases; one function an op, with the algebra that allows it.

An op that is not listed observes what it touches. The algebra is stated for row vectors, x -> x Q.
"""

from __future__ import annotations

from graphopt.analysis.rules import attention, elementwise, layout, linear
from graphopt.analysis.rules.common import Rule, ignore, observe
from graphopt.analysis.structure import PACKED
from graphopt.runtime_ops.operator import DOMAIN

RULES: dict[tuple[str, str], Rule] = {
    ("", "MatMul"): linear.matmul,
    ("", "DequantizeLinear"): linear.dequantize,
    ("", "Gather"): linear.gather,
    ("", "GatherND"): linear.gather_rows,
    ("", "ReduceSum"): linear.reduce,
    ("", "ReduceMean"): linear.reduce,
    ("", "Add"): elementwise.add,
    ("", "Sub"): elementwise.add,
    ("", "Mul"): elementwise.scale,
    ("", "Div"): elementwise.scale,
    ("", "Where"): elementwise.where,
    ("", "Neg"): elementwise.carry,
    ("", "Identity"): elementwise.carry,
    ("", "Cast"): elementwise.carry,
    ("", "RMSNormalization"): elementwise.root_mean_square,
    ("", "LayerNormalization"): elementwise.layer_norm,
    ("", "Reshape"): layout.regroup,
    ("", "Flatten"): layout.regroup,
    ("", "Squeeze"): layout.regroup,
    ("", "Unsqueeze"): layout.regroup,
    ("", "Transpose"): layout.transpose,
    ("", "Expand"): layout.expand,
    ("", "Split"): layout.split,
    ("", "Slice"): layout.slice_,
    ("", "Concat"): layout.concat,
    ("", "Attention"): attention.attention,
    ("", "RotaryEmbedding"): attention.rotary,
    ("", "Shape"): ignore,
    ("", "Size"): ignore,
    (DOMAIN, "Dequantize"): linear.dequantize,
    (DOMAIN, "RoundActivations"): linear.round_activations,
    (DOMAIN, "Hadamard"): elementwise.hadamard,
    **{(DOMAIN, name): linear.packed for name in PACKED},
}

__all__ = ["RULES", "Rule", "observe"]
