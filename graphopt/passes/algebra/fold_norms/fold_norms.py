"""Norms lose what they multiply, add and subtract to the weights around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphopt.graph.diagnostics import Effect
from graphopt.passes.algebra.fold_norms.gains import fold_gains
from graphopt.passes.algebra.fold_norms.means import fold_means
from graphopt.passes.base import Pass

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.passes.context import Context


class FoldNorms(Pass):
    """Leave of every norm only the division by the root mean square.

    before::

        y = MatMul(RMSNormalization(x, g), W)
        z = MatMul(LayerNormalization(x, g, b), W) + c;  x = MatMul(a, V) + d

    after, with C = I - 1 1^T / width::

        y = MatMul(RMSNormalization(x, 1), diag(g) W)
        z = MatMul(RMSNormalization(x, 1), diag(g) W) + (c + b W);  x = MatMul(a, V C) + d C

    since (n * g + b) W = n (diag(g) W) + b W, and a LayerNormalization is an RMSNormalization of x C: its mean moves
    into the weights that write x, where only such norms read x (SliceGPT, Ashkboos et al. 2024, section 3.2; QuaRot,
    Ashkboos et al. 2024, section 4). A unit gain lets rotations through. Between a norm and what reads it, rows may be
    moved around whole, as they are on their way to experts. A norm stays as it is when anything but a ``MatMul`` with a
    constant matrix reads it: a post-norm whose output is added to the residual, say, or a per-head norm in front of a
    rotary embedding.
    """

    name: ClassVar[str] = "fold_norms"
    effect: ClassVar[Effect] = "exact"

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Fold gains and biases forward, then means backward; say why anything stays."""
        ledger = context.ledger
        fold_gains(model, ledger)
        fold_means(model, ledger)
