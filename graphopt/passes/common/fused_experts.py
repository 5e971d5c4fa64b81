"""What onnxruntime's mixtures of experts ``MoE`` and ``QMoE`` compute, in standard operators.

    values, choices = TopK(router, k)           w = Softmax(values), or in MoE the k largest of Softmax(router)
    a = f(x W1[e] + b1[e])                      y = sum over the k choices e of w_e (a W2[e] + b2[e])

Rows are sorted by expert, as exporters write them (`graphopt.analysis.structure.experts`). f is an activation, or
SwiGLU of a gate g and a linear part l, which lie in turns among the columns of W1 (Shazeer 2020, section 2; with limits
as in gpt-oss)::

    G = min(g, limit)    L = clip(l, -limit, limit)    f = G sigmoid(alpha G) (L + beta)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import Inserter, shared_constant
from graphopt.graph.weights import WeightTensor, expression_of, new_weight
from graphopt.graph.weights.rearrangement import Concat, Slice

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphopt.graph.weights import Expression

OTHER_ACTIVATION = Rule(
    "unfuse_experts.activation", "its activation {activation} with swiglu_fusion {fusion} is not known"
)
SPARSE_MIXER = Rule(
    "unfuse_experts.sparse-mixer", "use_sparse_mixer routes in another way than by the largest {top} scores"
)
UNKNOWN_SHAPE = Rule("unfuse_experts.shape", "the shapes of its input and of its router's scores are not in the graph")

_ACTIVATIONS = ("relu", "gelu", "silu", "identity")
_INT64 = ir.DataType.INT64


@dataclass(frozen=True)
class FusedExperts:
    """A fused mixture.

    Attributes:
        node: ``MoE`` or ``QMoE``; its first inputs are x [..., hidden] and the scores of a router [tokens, experts].
        experts: how many there are.
        biases: b1 [experts, N1] and b2 [experts, hidden]; ``None`` where there is none.
    """

    node: ir.Node
    experts: int
    biases: tuple[ir.Value | None, ir.Value | None]

    @property
    def is_gated(self) -> bool:
        """Whether the activation is SwiGLU."""
        return self.node.attributes.get_string("activation_type", "relu") == "swiglu"

    @property
    def shares_among_all(self) -> bool:
        """Whether the softmax is one of the scores of all experts, and shares of those that are taken do not add to 1.

        onnxruntime has it so in ``MoE`` without ``normalize_routing_weights``, and never in ``QMoE``.
        """
        return self.node.op_type == "MoE" and not self.node.attributes.get_int("normalize_routing_weights", 0)


def why_stays(node: ir.Node) -> Fact | None:
    """Return why a fused mixture cannot be written in standard operators; ``None`` where it can."""
    activation = node.attributes.get_string("activation_type", "relu")
    fusion = node.attributes.get_int("swiglu_fusion", 0)
    x, scores = node.inputs[:2]
    if node.attributes.get_int("use_sparse_mixer", 0):
        return SPARSE_MIXER(top=node.attributes.get_int("k", 1))
    if activation not in (*_ACTIVATIONS, "swiglu") or (activation == "swiglu" and fusion != 1):
        return OTHER_ACTIVATION(activation=activation, fusion=fusion)
    if x is None or x.shape is None or scores is None or scores.shape is None:
        return UNKNOWN_SHAPE()
    return None


def split_gates(columns: Expression) -> Expression:
    """Return gates in front of linear parts, [..., 2 n] -> [..., n + n], of columns that hold them in turns."""
    axis = len(columns.shape) - 1
    return Concat((Slice.cut(columns, {axis: slice(0, None, 2)}), Slice.cut(columns, {axis: slice(1, None, 2)})), axis)


def write_experts(
    graph: ir.Graph, mixture: FusedExperts, first: Callable[[int], ir.Value], second: Callable[[int], ir.Value]
) -> tuple[list[ir.Node], ir.Value, list[ir.Node]]:
    """Write the nodes of a mixture in front of its fused node.

    Args:
        graph: the graph.
        mixture: the mixture, of which :func:`why_stays` says nothing.
        first: the matrix [hidden, N1] of an expert, gates in front of linear parts.
        second: the matrix [N2, hidden] of an expert.

    Returns:
        The nodes, what takes the place of the output of the fused node, and the products of all experts.
    """
    node, top = mixture.node, mixture.node.attributes.get_int("k", 1)
    x, scores = node.inputs[:2]
    assert x is not None and x.shape is not None and scores is not None and scores.shape is not None
    insert = Inserter(graph, node, node.name or "experts")
    tokens, hidden, dtype = scores.shape[0], x.shape[-1], x.dtype
    flat = x if len(x.shape) == 2 else insert.op("Reshape", [x, insert.integers([-1, hidden])], [tokens, hidden], dtype)  # type: ignore[list-item]
    outputs = [([tokens, top], dtype), ([tokens, top], _INT64)]
    if mixture.shares_among_all:
        scores = insert.op("Softmax", [scores], scores.shape, dtype, "shares", axis=-1)
    weights, choices = insert.node("TopK", [scores, insert.integers([top])], outputs, "router").outputs
    if not mixture.shares_among_all:
        weights = insert.op("Softmax", [weights], [tokens, top], dtype, "shares", axis=-1)

    flat_dims = insert.integers([-1])
    row = insert.op("Reshape", [choices, flat_dims], [None], _INT64, "choices")
    count = insert.op("Shape", [row], [1], _INT64, "count")
    order = insert.node("TopK", [row, count], [([None], _INT64), ([None], _INT64)], "sort", axis=0, largest=0)
    sorted_choices, positions = order.outputs
    bounds = _bounds(insert, sorted_choices, mixture.experts)
    sources = insert.op("Div", [positions, insert.integers(top)], [None], _INT64, "tokens")
    rows = insert.op("Gather", [flat, sources], [None, hidden], dtype, "rows", axis=0)

    b1, b2 = (None if bias is None else _bias(insert, bias, sorted_choices) for bias in mixture.biases)
    y, products = _mixture(insert, rows, bounds, [first(expert) for expert in range(mixture.experts)], "fc1")
    y = y if b1 is None else insert.op("Add", [y, b1], y.shape, dtype, "fc1.bias")
    y = _activation(insert, mixture, y)
    y, second_products = _mixture(insert, y, bounds, [second(expert) for expert in range(mixture.experts)], "fc2")
    y = y if b2 is None else insert.op("Add", [y, b2], y.shape, dtype, "fc2.bias")

    column = insert.op("Reshape", [weights, insert.integers([-1, 1])], [None, 1], dtype, "weights")
    share = insert.op("Gather", [column, positions], [None, 1], dtype, "weights.sorted", axis=0)
    y = insert.op("Mul", [y, share], [None, hidden], dtype, "weighted")
    size = insert.op("Shape", [positions], [1], _INT64, "places")
    span = insert.op("Squeeze", [size], [], _INT64, "number")
    numbers = insert.op("Range", [insert.integers(0), span, insert.integers(1)], [None], _INT64, "range")
    back = insert.op("ScatterElements", [positions, positions, numbers], [None], _INT64, "back", axis=0)
    y = insert.op("Gather", [y, back], [None, hidden], dtype, "unsorted", axis=0)
    y = insert.op("Reshape", [y, insert.integers([-1, top, hidden])], [tokens, top, hidden], dtype, "by_token")  # type: ignore[list-item]
    y = insert.op("ReduceSum", [y, insert.integers([1])], [tokens, hidden], dtype, "sum", keepdims=0)
    if len(x.shape) != 2:
        sizes = insert.op("Shape", [x], [len(x.shape)], _INT64, "sizes")
        y = insert.op("Reshape", [y, sizes], x.shape, dtype, "output")
    return insert.nodes, y, [*products, *second_products]


def _bounds(insert: Inserter, sorted_choices: ir.Value, experts: int) -> list[ir.Value]:
    """Return how many of the sorted choices are an expert or one before it, for each, int64 []."""
    names = shared_constant(insert.graph, f"experts.{experts}", np.arange(experts)[:, None])
    is_before = insert.op("LessOrEqual", [sorted_choices, names], [experts, None], ir.DataType.BOOL, "before")
    flags = insert.op("Cast", [is_before], [experts, None], _INT64, "ones", to=_INT64)
    ends = insert.op("ReduceSum", [flags, insert.integers([1])], [experts], _INT64, "ends", keepdims=0)
    parts = insert.node("Split", [ends], [([1], _INT64)] * experts, "split", axis=0, num_outputs=experts)
    return [
        insert.op("Squeeze", [part, insert.integers([0])], [], _INT64, f"end{expert}")
        for expert, part in enumerate(parts.outputs)
    ]


def _mixture(
    insert: Inserter, rows: ir.Value, bounds: list[ir.Value], matrices: list[ir.Value], name: str
) -> tuple[ir.Value, list[ir.Node]]:
    """Multiply the rows of each expert by its matrix; return all of them, and the products."""
    assert rows.shape is not None and matrices[0].shape is not None
    dims, start, parts = [None, matrices[0].shape[1]], insert.integers(0), []
    for expert, (end, matrix) in enumerate(zip(bounds, matrices, strict=True)):
        span = insert.op("Range", [start, end, insert.integers(1)], [None], _INT64, f"{name}.{expert}.range")
        part = insert.op("Gather", [rows, span], [None, rows.shape[1]], rows.dtype, f"{name}.{expert}.rows", axis=0)
        parts.append(insert.op("MatMul", [part, matrix], dims, rows.dtype, f"{name}.{expert}"))
        start = end
    products = [product for part in parts if (product := part.producer()) is not None]
    return insert.op("Concat", parts, dims, rows.dtype, name, axis=0), products


def _bias(insert: Inserter, bias: ir.Value, sorted_choices: ir.Value) -> ir.Value:
    assert bias.shape is not None
    return insert.op("Gather", [bias, sorted_choices], [None, bias.shape[1]], bias.dtype, f"{bias.name}.rows", axis=0)


def _activation(insert: Inserter, mixture: FusedExperts, y: ir.Value) -> ir.Value:
    """Return the activation of y."""
    attributes = mixture.node.attributes
    kind, dtype = attributes.get_string("activation_type", "relu"), y.dtype
    if kind == "identity":
        return y
    if kind != "swiglu":
        if kind == "silu":
            return insert.op("Mul", [y, insert.op("Sigmoid", [y], y.shape, dtype)], y.shape, dtype, "silu")
        approximate = {"approximate": "tanh"} if kind == "gelu" else {}
        return insert.op(kind.capitalize(), [y], y.shape, dtype, kind, **approximate)
    assert y.shape is not None and isinstance(y.shape[1], int)
    dims = [None, y.shape[1] // 2]

    def number(value: float) -> ir.Value:
        return shared_constant(insert.graph, f"number.{value:g}", np.array(value, np.float32))

    gate, linear = insert.node("Split", [y], [(dims, dtype)] * 2, "gate_up", axis=1, num_outputs=2).outputs
    limit = attributes.get_float("swiglu_limit", np.inf)
    if np.isfinite(limit):
        gate = insert.op("Min", [gate, number(limit)], dims, dtype, "gate")
        linear = insert.op("Clip", [linear, number(-limit), number(limit)], dims, dtype, "linear")
    alpha, beta = attributes.get_float("activation_alpha", 1.0), attributes.get_float("activation_beta", 0.0)
    argument = gate if alpha == 1 else insert.op("Mul", [gate, number(alpha)], dims, dtype, "scaled")
    gate = insert.op("Mul", [gate, insert.op("Sigmoid", [argument], dims, dtype)], dims, dtype, "swish")
    linear = linear if beta == 0 else insert.op("Add", [linear, number(beta)], dims, dtype, "shifted")
    return insert.op("Mul", [gate, linear], dims, dtype, "swiglu")


def bias_of(graph: ir.Graph, bias: ir.Value | None, *, is_gated: bool) -> ir.Value | None:
    """Return biases [experts, N] of a fused mixture as :func:`write_experts` takes them."""
    if bias is None or not is_gated:
        return bias
    tensor = WeightTensor(split_gates(expression_of(bias.const_value)))
    value = new_weight(graph, f"{bias.name}.apart", tensor)
    value.dtype, value.shape = tensor.dtype, ir.Shape(tensor.shape)
    return value
