"""Inputs that 4 bits would hurt most are spared: they keep 8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from pydantic import Field

from graphopt.analysis.structure.products import is_thin, linear_nodes, lm_head_nodes, router_nodes
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.weights import weight_of
from graphopt.passes.base import Pass
from graphopt.passes.common.input_rounding import spare
from graphopt.quantization.rounding.single_thread import one_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from graphopt.passes.context import Context
    from graphopt.quantization.statistics import InputStatistics

INPUT_SPARED = Rule(
    "spare_inputs.spared",
    "{input} keeps 8 bits: 4 would change what its products make by {error:.2%}, {noise:.2%} of the input times "
    "{gain:.2f}",
)
INPUT_ROUNDED = Rule(
    "spare_inputs.rounded", "{input} can do with 4 bits: they change what its products make by {error:.2%}"
)


class SpareInputs(Pass):
    """Choose which inputs of products ``quantize_activations`` rounds to 8 bits where it rounds others to 4.

    before::

        y = MatMul(x, W)

    after, with ``quantize_activations`` of 4 bits behind it::

        y = MatMul(ai.graphopt::RoundActivations(x; activations=int8, group), ...)    where 4 bits of x cost most
        y = MatMul(ai.graphopt::RoundActivations(x; activations=uint4, group), ...)   anywhere else

    Rounding x adds an error N. With errors that are not correlated, of mean square v, the products of x change by

        v |W|^2 / (trace(W^T H W) / tokens)          H = X^T X

    of what they make on average. v is measured on the text that statistics are collected on, as what 4 bits in groups
    of 32 add: inputs with spikes have more of it (QFeM, Yang et al. 2024, takes the ratio of the largest number to the
    median for v). How much of it reaches the output depends on the weight: products whose strong columns read what x
    hardly has lose most. Weights and their bytes stay what they are. The graph is the same; the choice is a note at
    each value, which ``quantize_activations`` takes away.

    Attributes:
        share: of the different inputs of products, rounded to a whole number of them.
    """

    name: ClassVar[str] = "spare_inputs"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("unpack", "keep_codes")

    share: Annotated[float, Field(ge=0, le=1)] = 0.25

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Put a note at the inputs that lose most; say of all others what they lose."""
        graph = model.graph
        lm_heads, routers = lm_head_nodes(graph), router_nodes(graph)
        products: dict[ir.Value, list[ir.Node]] = {}
        for node in linear_nodes(graph):
            weight, x = weight_of(node, 1), node.inputs[0]
            assert weight is not None and x is not None
            if node not in routers - lm_heads and not is_thin(weight):
                products.setdefault(x, []).append(node)
        # That of the lm_head is asked for too: quantize_weights wants it, and finds all of them kept.
        statistics = context.statistics.inputs(model, [nodes[0] for nodes in products.values()]) if products else {}
        gains = {
            x: (statistics[nodes[0]].noise, gain_of(nodes, statistics[nodes[0]]))
            for x, nodes in products.items()
            if not set(nodes) & lm_heads
        }
        ranked_inputs = sorted(gains, key=lambda x: -gains[x][0] * gains[x][1])
        spared_inputs = set(ranked_inputs[: round(self.share * len(ranked_inputs))])
        for x, (noise, gain) in gains.items():
            if x in spared_inputs:
                spare(x)
                context.ledger.report_change(
                    x.name or "?", INPUT_SPARED(input=x.name, error=noise * gain, noise=noise, gain=gain)
                )
            else:
                context.ledger.skipped(x, INPUT_ROUNDED(input=x.name, error=noise * gain))


def gain_of(nodes: Sequence[ir.Node], statistics: InputStatistics) -> float:
    """Return how much larger an uncorrelated error of an input is behind its products, each relative to the input's.

    1 where the products treat the error as they treat the input; 0 where they make nothing of the input.
    """
    H = np.asarray(statistics.hessian().numpy(), np.float32)
    error, signal = 0.0, 0.0
    for node in nodes:
        weight = weight_of(node, 1)
        assert weight is not None and weight.const_value is not None
        W = np.asarray(weight.const_value.numpy(), np.float32)
        error += float(np.square(W, dtype=np.float64).sum())
        with one_thread():
            signal += float(np.vdot(W, H @ W))
    return error * statistics.mean_square / signal if signal > 0 else 0.0
