"""Gains and biases of norms move forward, into the weights that read them, past what only moves rows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import insert_behind
from graphopt.graph.weights import (
    DOUBLE,
    Cast,
    Expression,
    Inline,
    Scale,
    Sum,
    VectorTimes,
    WeightTensor,
    expression_of,
    new_weight,
    own_input,
    rewrite,
    weight_of,
)
from graphopt.passes.algebra.fold_norms.readers import Reader, readers_of

if TYPE_CHECKING:
    from graphopt.passes.context import Ledger

NORMS = ("RMSNormalization", "LayerNormalization")
_BIAS = 2

ROWS_SCALED = Rule("fold_norms.rows-scaled", "rows scaled by the gain of {norm}")
GAIN_FOLDED = Rule("fold_norms.gain-folded", "gain became one", bias=", bias is gone")
BIAS_TAKEN = Rule("fold_norms.bias-taken", "took the bias of a norm, seen through {weight}")
BIAS_ADDED = Rule("fold_norms.bias-added", "adds the bias of a norm, seen through {weight}")
GAIN_IS_ONE = Rule("fold_norms.gain-is-one", "its gain is one already")
GAIN_NOT_CONSTANT = Rule("fold_norms.gain-not-constant", "its gain is no constant vector")
BIAS_NOT_CONSTANT = Rule("fold_norms.bias-not-constant", "its bias is no constant")
STATISTICS_READ = Rule("fold_norms.statistics-read", "something reads its mean or deviation")
MOVED_BY = Rule("fold_norms.moved", ", moved by {by:and},")
GRAPH_OUTPUT = Rule("fold_norms.graph-output", "its output{moved} is an output of the graph")
NO_MATRIX = Rule(
    "fold_norms.no-matrix",
    "its output{moved} is read by {op}, which has no constant matrix to take the gain",
    also=["reader"],
)


def fold_gains(model: ir.Model, ledger: Ledger) -> None:
    """Fold gain and bias of each norm, or say why they stay."""
    for node in list(model.graph):
        if node.op_type not in NORMS:
            continue
        reason = _reason_to_stay(node)
        if reason is not None:
            ledger.skipped(node, reason)
            continue
        gain = own_input(node, 1)
        assert gain.const_value is not None
        factors = Cast(expression_of(gain.const_value), DOUBLE)
        bias = weight_of(node, _BIAS)
        if np.all(factors.numpy() == 1) and bias is None:
            ledger.skipped(node, GAIN_IS_ONE())
            continue
        for product in [reader.node for reader in readers_of(node.outputs[0])]:
            assert product is not None
            if bias is not None and bias.const_value is not None:
                _add_behind(product, bias, ledger)
            weight = own_input(product, 1)
            rewrite(weight, partial(Scale, factors=factors, axis=0))
            ledger.changed(weight, ROWS_SCALED(norm=node.name), [gain])
        unit_gain = np.ones(factors.shape, gain.const_value.dtype.numpy())
        gain.const_value = WeightTensor(Inline(unit_gain, gain.const_value.dtype), gain.name)
        if bias is not None:
            # Not an empty third input: onnxruntime 1.31 crashes while it optimizes such a LayerNormalization.
            node.resize_inputs(_BIAS)
        ledger.changed(node, GAIN_FOLDED(bias=bias is not None))


def _reason_to_stay(node: ir.Node) -> Fact | None:
    gain = weight_of(node, 1)
    if gain is None or gain.const_value is None or len(gain.const_value.shape) != 1:
        return GAIN_NOT_CONSTANT()
    if len(node.inputs) > _BIAS and node.inputs[_BIAS] is not None and weight_of(node, _BIAS) is None:
        return BIAS_NOT_CONSTANT()
    if any(extra.uses() for extra in node.outputs[1:]):
        return STATISTICS_READ()
    return next((reason for reader in readers_of(node.outputs[0]) if (reason := _cannot_take(reader))), None)


def _cannot_take(reader: Reader) -> Fact | None:
    node, moved_by = reader.node, MOVED_BY(by=[*dict.fromkeys(reader.moved_by)]) if reader.moved_by else None
    if node is None:
        return GRAPH_OUTPUT(moved=moved_by)
    weight = weight_of(node, 1)
    if node.op_type != "MatMul" or reader.input != 0 or weight is None or len(weight.shape or ()) != 2:
        return NO_MATRIX(moved=moved_by, reader=node.name, op=node.op_type)
    return None


def _add_behind(product: ir.Node, bias: ir.Value, ledger: Ledger) -> None:
    """Add b W behind ``product``, whose weight W is still unscaled: into the bias that is there, or a new one."""
    weight = weight_of(product, 1)
    assert weight is not None and weight.const_value is not None and bias.const_value is not None
    shift = VectorTimes(expression_of(bias.const_value), expression_of(weight.const_value))
    add = _bias_of(product)
    if add is not None:
        bias_value = own_input(add[0], add[1])
        rewrite(bias_value, partial(_sum_of, addend=shift))
        ledger.changed(bias_value, BIAS_TAKEN(weight=weight.name), [bias, weight])
        return
    graph, output = product.graph, product.outputs[0]
    assert graph is not None
    bias_weight = new_weight(graph, f"{product.name}.bias", WeightTensor(Cast(shift, weight.const_value.dtype)))
    bias_node = ir.node("Add", [output, bias_weight], name=f"{product.name}.add_bias")
    insert_behind(output, bias_node, value_name=f"{output.name}.unbiased")
    ledger.changed(bias_node, BIAS_ADDED(weight=weight.name), [bias, weight])


def _sum_of(term: Expression, addend: Expression) -> Expression:
    return Sum(term, addend)


def _bias_of(product: ir.Node) -> tuple[ir.Node, int] | None:
    """Return the ``Add`` that is all that reads ``product``, and which of its inputs is a constant vector."""
    uses, weight = product.outputs[0].uses(), weight_of(product, 1)
    if len(uses) != 1 or product.outputs[0].is_graph_output() or weight is None or weight.shape is None:
        return None
    (use,) = uses
    addend = weight_of(use.node, 1 - use.idx) if use.node.op_type == "Add" else None
    full = addend is not None and addend.shape is not None and list(addend.shape) == [weight.shape[1]]
    return (use.node, 1 - use.idx) if full else None
