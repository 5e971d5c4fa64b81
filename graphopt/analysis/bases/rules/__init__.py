"""What each op does to bases; one function an op, with the algebra that allows it.

An op that is not listed observes what it touches. The algebra is stated for row vectors, x -> x Q.
"""

from __future__ import annotations

from graphopt.analysis.bases.rules import attention, elementwise, layout, linear
from graphopt.analysis.bases.rules.common import Rule, ignore, observe
from graphopt.runtime_ops import DOMAIN, OPERATORS, Coordinates

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
}

_OF_EFFECT: dict[Coordinates, Rule] = {
    Coordinates.OBSERVES: observe,
    Coordinates.ROTATES: elementwise.hadamard,
    Coordinates.DECODES: linear.dequantize,
    Coordinates.MULTIPLIES: linear.packed,
    Coordinates.ROUNDS: linear.round_activations,
}
RULES |= {(DOMAIN, name): _OF_EFFECT[operator.schema.coordinates] for name, operator in OPERATORS.items()}

__all__ = ["RULES", "Rule", "observe"]
