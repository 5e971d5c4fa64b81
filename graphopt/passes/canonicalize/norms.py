"""Decomposed root-mean-square norms become ``RMSNormalization``.

    x / sqrt(mean(x^2) + epsilon) * gain   ->   RMSNormalization(x, gain; epsilon)

(Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4). The square may be ``Pow(x, 2)`` or
``x * x``; the division a ``Div``, or a product with the reciprocal.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchResult, pattern

from graphopt.passes.base import Ledger
from graphopt.passes.canonicalize.cleanup import scalar


class _RootMeanSquare(pattern.RewriteRuleClassBase):
    """The pattern, its conditions, and what takes its place."""

    def __init__(self, ledger: Ledger, *, gain_first: bool) -> None:
        super().__init__("RootMeanSquare")
        self._ledger, self._gain_first = ledger, gain_first

    def pattern(self, op: Any, x: Any, gain: Any, epsilon: Any) -> Any:
        square = pattern.OrValue([op.Pow(x, 2.0), op.Mul(x, x)])
        mean = op.ReduceMean(square, [-1], _allow_other_attributes=True)
        root = op.Sqrt(pattern.OrValue([op.Add(mean, epsilon), op.Add(epsilon, mean)]))
        normalized = pattern.OrValue([op.Div(x, root), op.Mul(x, op.Reciprocal(root)), op.Mul(x, op.Div(1.0, root))])
        return op.Mul(gain, normalized) if self._gain_first else op.Mul(normalized, gain)

    def check(self, op: Any, *_: Any, gain: ir.Value, epsilon: ir.Value, **__: Any) -> MatchResult:
        result = MatchResult()
        if scalar(epsilon) is None:
            return result.fail("epsilon is no constant number", epsilon)
        if gain.const_value is None or gain.shape is None or len(gain.shape) != 1:
            return result.fail("the gain is no constant vector", gain)
        return result

    def rewrite(self, op: Any, x: ir.Value, gain: ir.Value, epsilon: ir.Value, **_: Any) -> ir.Value:
        output: ir.Value = op.RMSNormalization(x, gain, axis=-1, epsilon=scalar(epsilon))
        producer = output.producer()
        assert producer is not None
        producer.name = f"RMSNormalization.{gain.name}"
        self._ledger.changed(producer, "decomposed norm became RMSNormalization", [x, gain])
        return output


def lift_norms(model: ir.Model, ledger: Ledger) -> None:
    """Lift every decomposed norm of the graph; the opset must be 23 or later."""
    rules = [_RootMeanSquare.rule(ledger, gain_first=first) for first in (False, True)]  # type: ignore[no-untyped-call]
    pattern.RewriteRuleSet(rules).apply_to_model(model)
