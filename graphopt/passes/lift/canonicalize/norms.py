"""Decomposed norms become ``RMSNormalization`` and ``LayerNormalization``.

    x / sqrt(mean(x^2) + epsilon) * gain        ->   RMSNormalization(x, gain; epsilon)
    RMSNormalization(x - mean(x), gain)         ->   LayerNormalization(x, gain)
    LayerNormalization(x, gain) + bias          ->   LayerNormalization(x, gain, bias)

(Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equations 2 to 4.) The square may be ``Pow(x, 2)`` or
``x * x``; the division a ``Div``, or a product with the reciprocal. One after the other the three lift a
LayerNormalization that is spelled out from its mean to its bias; the second alone, Cohere's, which has no bias.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchResult, pattern

from graphopt.passes.context import Ledger
from graphopt.passes.lift.canonicalize.cleanup import scalar


class _NormRule(pattern.RewriteRuleClassBase):
    """What the three rules share: a ledger, and the two orders of a commutative operator."""

    def __init__(self, ledger: Ledger, *, swapped: bool = False) -> None:
        super().__init__(type(self).__name__)
        self._ledger, self._swapped = ledger, swapped

    def _ordered(self, left: Any, right: Any) -> tuple[Any, Any]:
        return (right, left) if self._swapped else (left, right)

    def _norm(self, op: Any, kind: str, inputs: list[ir.Value], epsilon: float, old: ir.Node, what: str) -> ir.Value:
        output: ir.Value = getattr(op, kind)(*inputs, axis=-1, epsilon=epsilon)
        made = output.producer()
        assert made is not None
        # After a node that goes, and not after the gain: exporters share one initializer among equal gains.
        made.name = old.name if "Normalization" in old.op_type else f"{old.name}.{kind}"
        self._ledger.changed(made, what, [old, *inputs])
        return output


class _RootMeanSquare(_NormRule):
    """Lift the division by the root mean square, and the gain behind it."""

    def pattern(self, op: Any, x: Any, gain: Any, epsilon: Any) -> Any:
        square = pattern.OrValue([op.Pow(x, 2.0), op.Mul(x, x)])
        mean = op.ReduceMean(square, [-1], _allow_other_attributes=True, _outputs=["mean"])
        root = op.Sqrt(pattern.OrValue([op.Add(mean, epsilon), op.Add(epsilon, mean)]))
        normalized = pattern.OrValue([op.Div(x, root), op.Mul(x, op.Reciprocal(root)), op.Mul(x, op.Div(1.0, root))])
        return op.Mul(*self._ordered(normalized, gain))

    def check(self, op: Any, *_: Any, gain: ir.Value, epsilon: ir.Value, mean: ir.Value, **__: Any) -> MatchResult:
        result = MatchResult()
        if scalar(epsilon) is None:
            return result.fail("epsilon is no constant number", epsilon)
        if not _keeps_axes(mean):
            return result.fail("the mean loses its axis, and is spread over another", mean)
        if not _is_vector(gain):
            return result.fail("the gain is no constant vector", gain)
        return result

    def rewrite(self, op: Any, x: ir.Value, gain: ir.Value, epsilon: ir.Value, mean: ir.Value, **_: Any) -> ir.Value:
        number, what = scalar(epsilon), "decomposed norm became RMSNormalization"
        assert number is not None
        return self._norm(op, "RMSNormalization", [x, gain], number, _producer(mean), what)


class _Centered(_NormRule):
    """Take the subtraction of the mean into the norm behind it."""

    def pattern(self, op: Any, x: Any, gain: Any) -> Any:
        mean = op.ReduceMean(x, [-1], _allow_other_attributes=True, _outputs=["mean"])
        return op.RMSNormalization(op.Sub(x, mean), gain, _allow_other_attributes=True, _outputs=["normed"])

    def check(self, op: Any, x: ir.Value, gain: ir.Value, mean: ir.Value, normed: ir.Value, **_: Any) -> MatchResult:
        result = MatchResult()
        if not _keeps_axes(mean):
            return result.fail("the mean loses its axis, and is spread over another", mean)
        if not _is_vector(gain):
            return result.fail("the gain is no constant vector", gain)
        if not _spans_last_axis(x, normed):
            return result.fail("the norm spans more than the axis of the mean", normed)
        return result

    def rewrite(self, op: Any, x: ir.Value, gain: ir.Value, normed: ir.Value, **_: Any) -> ir.Value:
        what = "RMSNormalization of what has its mean taken away became LayerNormalization"
        return self._norm(op, "LayerNormalization", [x, gain], _epsilon_of(normed), _producer(normed), what)


class _Biased(_NormRule):
    """Take the bias behind a LayerNormalization into it."""

    def pattern(self, op: Any, x: Any, gain: Any, bias: Any) -> Any:
        normed = op.LayerNormalization(x, gain, _allow_other_attributes=True, _outputs=["normed"])
        return op.Add(*self._ordered(normed, bias))

    def check(self, op: Any, x: ir.Value, gain: ir.Value, bias: ir.Value, normed: ir.Value, **_: Any) -> MatchResult:
        result = MatchResult()
        if not (_is_vector(gain) and _is_vector(bias) and bias.shape == gain.shape):
            return result.fail("gain and bias are no constant vectors of one width", bias)
        if not _spans_last_axis(x, normed):
            return result.fail("the norm spans more than the last axis", normed)
        return result

    def rewrite(self, op: Any, x: ir.Value, gain: ir.Value, bias: ir.Value, normed: ir.Value, **_: Any) -> ir.Value:
        what = "the bias behind a LayerNormalization became its own"
        return self._norm(op, "LayerNormalization", [x, gain, bias], _epsilon_of(normed), _producer(normed), what)


def _is_vector(value: ir.Value) -> bool:
    return value.const_value is not None and len(value.const_value.shape) == 1


def _producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None
    return node


def _keeps_axes(mean: ir.Value) -> bool:
    return _producer(mean).attributes.get_int("keepdims", 1) == 1


def _spans_last_axis(x: ir.Value, normed: ir.Value) -> bool:
    axis = _producer(normed).attributes.get_int("axis", -1)
    return axis == -1 or (x.shape is not None and axis == len(x.shape) - 1)


def _epsilon_of(normed: ir.Value) -> float:
    return _producer(normed).attributes.get_float("epsilon", 1e-5)


def lift_norms(model: ir.Model, ledger: Ledger) -> None:
    """Lift every decomposed norm of the graph; the opset must be 23 or later."""
    both = (False, True)
    for rules in (
        [_RootMeanSquare.rule(ledger, swapped=swapped) for swapped in both],  # type: ignore[no-untyped-call]
        [_Centered.rule(ledger)],  # type: ignore[no-untyped-call]
        [_Biased.rule(ledger, swapped=swapped) for swapped in both],  # type: ignore[no-untyped-call]
    ):
        pattern.RewriteRuleSet(rules).apply_to_model(model)
