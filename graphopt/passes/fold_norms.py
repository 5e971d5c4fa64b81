"""Gains of norms move into the weights that read them."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

import numpy as np
import onnx_ir as ir

from graphopt.passes.base import Effect, Ledger, Options, Pass
from graphopt.weights import Weight, own, rewrite, weight_of


class FoldNormsOptions(Options):
    """Folding has no options."""

    step: Literal["fold_norms"] = "fold_norms"


class FoldNorms(Pass):
    """Move the gain of every RMSNormalization into the weights that read it.

    before::

        n = RMSNormalization(x, g);  y = MatMul(n, W)

    after::

        n = RMSNormalization(x, 1);  y = MatMul(n, diag(g) W)

    since (x / rms(x) * g) W = (x / rms(x)) (diag(g) W). A unit gain lets rotations through (QuaRot, Ashkboos et al.
    2024, section 4.1). A norm stays as it is when anything but a ``MatMul`` with a constant matrix reads it: a
    post-norm whose output is added to the residual, say, or a per-head norm in front of a rotary embedding.
    """

    name: ClassVar[str] = "fold_norms"
    effect: ClassVar[Effect] = "exact"
    options_type: ClassVar[type[Options]] = FoldNormsOptions

    def __init__(self, options: FoldNormsOptions) -> None:
        self.options = options

    def rewrite(self, model: ir.Model, ledger: Ledger) -> None:
        """Fold each gain, or say why it stays."""
        for node in model.graph:
            if node.op_type == "LayerNormalization":
                ledger.skipped(
                    node, "only RMSNormalization is folded yet, not the gain, bias and mean of LayerNormalization"
                )
            if node.op_type != "RMSNormalization":
                continue
            reason = self._reason_to_stay(node)
            if reason is not None:
                ledger.skipped(node, reason)
                continue
            gain = own(node, 1)
            assert gain.const_value is not None
            factors = gain.const_value.numpy().astype(np.float64)
            if np.all(factors == 1):
                ledger.skipped(node, "its gain is one already")
                continue
            for use in node.outputs[0].uses():
                weight = own(use.node, 1)
                rewrite(weight, partial(scale_rows, factors=factors))
                ledger.changed(weight, f"rows scaled by the gain of {node.name}", [gain])
            rewrite(gain, np.ones_like)
            ledger.changed(node, "gain became one")

    @staticmethod
    def _reason_to_stay(node: ir.Node) -> str | None:
        gain, output = weight_of(node, 1), node.outputs[0]
        if gain is None or gain.const_value is None or len(gain.const_value.shape) != 1:
            return "its gain is no constant vector"
        if output.is_graph_output():
            return "its output is an output of the graph"
        for use in output.uses():
            weight = weight_of(use.node, 1)
            if use.node.op_type != "MatMul" or use.idx != 0 or weight is None or len(weight.shape or ()) != 2:
                return f"its output is read by {use.node.op_type}, which has no constant matrix to take the gain"
        return None


def scale_rows(matrix: Weight, factors: Weight) -> Weight:
    """Return diag(factors) matrix; ``matrix`` [rows, columns], ``factors`` [rows]."""
    return factors[:, None] * matrix
