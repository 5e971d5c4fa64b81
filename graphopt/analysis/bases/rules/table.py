"""Which rule an op has. An op that is not in the table observes what it touches."""

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
    ("", "Where"): elementwise.select,
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
    ("", "Slice"): layout.slice_axes,
    ("", "Concat"): layout.concat,
    ("", "Attention"): attention.attention,
    ("", "RotaryEmbedding"): attention.rotary,
    ("", "Shape"): ignore,
    ("", "Size"): ignore,
}

_BY_COORDINATES: dict[Coordinates, Rule] = {
    Coordinates.OBSERVES: observe,
    Coordinates.ROTATES: elementwise.hadamard,
    Coordinates.DECODES: linear.dequantize,
    Coordinates.WEIGHS: attention.recurrence,
    Coordinates.MULTIPLIES: linear.multiply_by_codes,
    Coordinates.ROUNDS: linear.round_activations,
}
RULES |= {(DOMAIN, name): _BY_COORDINATES[operator.schema.coordinates] for name, operator in OPERATORS.items()}
