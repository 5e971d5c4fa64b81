"""The strongest directions of what products read go past the product, in floats: what is left has few outliers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from pydantic import Field

from graphopt.analysis.structure.products import THIN, is_thin, linear_nodes, lm_head_nodes, router_nodes
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.weights import (
    Cast,
    Inline,
    Transpose,
    VectorTimes,
    WeightTensor,
    expression_of,
    new_weight,
    weight_of,
)
from graphopt.passes.base import Pass
from graphopt.quantization.rounding.single_thread import one_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.passes.context import Context, Ledger

SPLIT = Rule("split_inputs.split", "{rank} directions, {share:.1%} of the mean square of {input}, go past it in floats")
NO_DIRECTIONS = Rule(
    "split_inputs.none", "no direction has {least:.1%} of the mean square of {input}; the strongest has {share:.1%}"
)
LM_HEAD = Rule("split_inputs.lm-head", "it makes the logits: later steps leave its input in floats")
ROUTER = Rule("split_inputs.router", "it chooses experts: later steps leave its input in floats")
BRANCH = Rule("split_inputs.branch", "a branch of few directions itself")
NOT_FLOAT = Rule("split_inputs.not-float", "its weight is {type}, and branches are float32")


# Steps of the iteration, and vectors that it has besides those asked for.
_STEPS, _SPARE = 12, 4


class SplitInputs(Pass):
    """Let the strongest directions of an input go past a product, so that the rest can be rounded to few bits.

    before::

        y = MatMul(x, W)

    after, for U [rows, rank] with orthonormal columns::

        c = MatMul(x, U)
        y = Add(MatMul(Sub(x, MatMul(c, U^T)), W), MatMul(c, U^T W))

    x W = (x - x U U^T) W + (x U) (U^T W). U holds the eigenvectors of X^T X with the largest eigenvalues: the mean of
    the input, and channels that are large in all tokens or huge in the first one. A rotation spreads these over all
    coordinates, where a scale per token must reach them: they take the codes that the other directions need. Both
    terms are computed in floats here; quantize_weights and quantize_activations round W and what it reads, and leave
    the thin products. The low-rank branch in floats is that of SVDQuant (Li et al. 2024, section 4), for inputs instead
    of weights.

    Attributes:
        rank: directions of an input, at most.
        least: the share of the mean square that a direction must hold.
    """

    name: ClassVar[str] = "split_inputs"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("rotate",)

    rank: Annotated[int, Field(ge=1, le=THIN)] = 4
    least: Annotated[float, Field(gt=0, le=1)] = 0.02

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Split the input of every matrix that later steps round; say why others stay."""
        ledger, graph = context.ledger, model.graph
        lm_heads, routers = lm_head_nodes(graph), router_nodes(graph)
        products: dict[ir.Value, list[ir.Node]] = {}
        for node in linear_nodes(graph):
            weight, x = weight_of(node, 1), node.inputs[0]
            assert weight is not None and x is not None
            if node in lm_heads or node in routers:
                ledger.skipped(node, LM_HEAD() if node in lm_heads else ROUTER())
            elif is_thin(weight):
                ledger.skipped(node, BRANCH())
            elif weight.dtype != ir.DataType.FLOAT:
                ledger.skipped(node, NOT_FLOAT(type=str(weight.dtype)))
            else:
                products.setdefault(x, []).append(node)
        statistics = context.statistics.inputs(model, [nodes[0] for nodes in products.values()]) if products else {}
        for x, nodes in products.items():
            values, vectors = directions(statistics[nodes[0]].hessian().numpy(), self.rank)
            rank = int((values >= self.least).sum())
            if rank:
                _split(graph, x, nodes, vectors[:, :rank], float(values[:rank].sum()), ledger)
            else:
                strongest = float(values[0]) if len(values) else 0.0
                for node in nodes:
                    ledger.skipped(node, NO_DIRECTIONS(least=self.least, input=x.name, share=strongest))


def directions(hessian: npt.NDArray[np.float32], rank: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float32]]:
    """Return nearly the largest eigenvalues of X^T X as shares of their sum, and orthonormal vectors [rows, rank].

    The sign of a vector is that of its largest number, so that it is the same wherever it is computed.

    Raises:
        InputError: the matrix is not finite.
    """
    if not np.isfinite(hessian).all():
        raise InputError("the statistics of a weight's inputs are NaN or infinite", shape=hessian.shape)
    rank = min(rank, len(hessian))
    H = hessian.astype(np.float64)
    total = float(np.trace(H))
    if not total:
        return np.zeros(rank), np.eye(len(H), rank, dtype=np.float32)
    H /= total
    with one_thread():
        # Any orthonormal directions will do, so a few steps of subspace iteration do what eigenvectors would.
        vectors = np.random.default_rng(0).standard_normal((len(H), min(rank + _SPARE, len(H))))
        for _ in range(_STEPS):
            vectors, _ = np.linalg.qr(H @ vectors)
        small, turn = np.linalg.eigh(vectors.T @ H @ vectors)
        values, vectors = small[::-1][:rank], (vectors @ turn[:, ::-1])[:, :rank]
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(0)[None], 0)
    return values, (vectors * np.sign(largest)).astype(np.float32)


def _split(
    graph: ir.Graph, x: ir.Value, nodes: Sequence[ir.Node], U: npt.NDArray[np.float32], share: float, ledger: Ledger
) -> None:
    name, rank = x.name or "x", U.shape[1]
    directions = new_weight(graph, f"{name}.directions", WeightTensor(Inline.from_array(U)))
    transposed_directions = Transpose(expression_of(directions.const_value), (1, 0))
    turned_directions = new_weight(graph, f"{name}.directions.turned", WeightTensor(transposed_directions))
    inside = _node(graph, nodes[0], "MatMul", [x, directions], f"{name}.inside", x, rank)
    back = _node(graph, nodes[0], "MatMul", [inside, turned_directions], f"{name}.back", x, U.shape[0])
    remainder = _node(graph, nodes[0], "Sub", [x, back], f"{name}.rest", x, U.shape[0])
    for value in (inside, back, remainder):
        node = value.producer()
        assert node is not None
        ledger.changed(node, SPLIT(rank=rank, share=share, input=name), list(nodes))
    for node in nodes:
        weight, old = weight_of(node, 1), node.outputs[0]
        assert weight is not None and weight.const_value is not None
        product = VectorTimes(transposed_directions, expression_of(weight.const_value))
        branch = new_weight(graph, f"{weight.name}.directions", WeightTensor(Cast(product, ir.DataType.FLOAT)))
        columns = weight.const_value.shape.numpy()[1]
        past = _node(graph, node, "MatMul", [inside, branch], f"{node.name}.directions", old, columns)
        node.replace_input_with(0, remainder)
        total = ir.node("Add", [old, past], name=f"{node.name}.joined")
        value = total.outputs[0]
        value.type, value.shape = old.type, old.shape
        old.replace_all_uses_with(value, replace_graph_outputs=True)
        total.replace_input_with(0, old)
        value.name, old.name = old.name, f"{old.name}.rest"
        graph.insert_after(node, total)
        ledger.changed(total, SPLIT(rank=rank, share=share, input=name), [node])


def _node(
    graph: ir.Graph, before: ir.Node, op: str, inputs: Sequence[ir.Value], name: str, template: ir.Value, width: int
) -> ir.Value:
    """Put a node in front of another one; what it makes is as ``template``, with another width."""
    node = ir.node(op, inputs, name=name)
    value = node.outputs[0]
    value.name, value.type = f"{name}.output", template.type
    value.shape = None if template.shape is None else ir.Shape([*[*template.shape][:-1], width])
    graph.insert_before(before, node)
    return value
